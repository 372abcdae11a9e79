"""What every method gives: a state_dict that knows how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from maecho._version import __version__
from maecho.upload import storage as files


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
        about = files.read_about(Path(path), "model")
        return cls(files.read_tensors(Path(path)), about.get("averaged", ()), about.get("recipe"))
