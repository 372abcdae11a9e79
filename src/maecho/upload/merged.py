"""What every method takes and gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from maecho import schema
from maecho._version import __version__
from maecho.errors import UploadError
from maecho.network.layers import Layer
from maecho.upload import storage as files
from maecho.upload.upload import Upload


class Merged(dict[str, Tensor]):
    """A state_dict that knows how it was made."""

    def __init__(
        self, weights: Mapping[str, Tensor], averaged: Iterable[str] = (), recipe: Mapping[str, Any] | None = None
    ):
        super().__init__(weights)
        self.averaged = tuple(averaged)
        """Names that were only averaged, nothing being known of them but their values: no input matrix, no inputs."""
        self.recipe = dict(recipe or {})
        self.widths: dict[str, int] = {}
        """Neurons of each space, where a method may have changed them; see `maecho.network.spaces.load`."""

    def save(self, path: str | Path) -> None:
        """One safetensors file that any tool can read, with the recipe in its header."""
        about = {"recipe": self.recipe, "averaged": list(self.averaged), "made_by": f"maecho {__version__}"}
        files.write_tensors(Path(path), "model", self, about)

    @classmethod
    def load(cls, path: str | Path) -> Merged:
        with files.opened(Path(path), "model") as file:
            try:
                about = schema.convert(file.about, _About)
            except ValueError as error:
                raise UploadError(f"{path} must be a maecho model, got one whose header says: {error}") from error
            return cls(file.read_all(), about.averaged, about.recipe)


@dataclass(frozen=True)
class _About:
    """What the file of a merged model says of it."""

    averaged: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)


class Method(Protocol):
    """Frozen hyper-parameters that can be called."""

    @property
    def needs(self) -> frozenset[str]:
        """The statistics without which it cannot work."""
        ...

    def __call__(self, uploads: Sequence[Upload]) -> Merged: ...


def assemble(
    like: Upload, plain: Mapping[str, Tensor], matrices: Mapping[str, Tensor], silent: Iterable[str] = ()
) -> Merged:
    """One state_dict of averaged tensors and merged matrices (by layer name), in the dtypes of the uploads.

    `silent` are layers of which no client saw an input.
    """
    layers: dict[str, Layer] = {layer.name: layer for layer in like.layers}
    out = {name: plain[name].to(tensor.dtype, copy=True) for name, tensor in like.weights.items()}
    merged: set[str] = set()
    for name, matrix in matrices.items():
        parts = layers[name].write(matrix, like.weights)
        out |= parts
        if name not in silent:
            merged |= parts.keys()
    out |= {alias: out[kept] for alias, kept in like.aliases.items()}
    return Merged(out, averaged=[name for name in like.weights if name not in merged])
