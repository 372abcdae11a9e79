"""What a method is: frozen hyper-parameters that can be called, with a guide for those who have to choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from maecho.network.layers import Layer
from maecho.upload.cohort import Cohort
from maecho.upload.merged import Merged
from maecho.upload.parted import Parted, parted
from maecho.upload.upload import Upload


@dataclass(frozen=True, kw_only=True)
class Guide:
    """Describes one method to people who have to choose one. `maecho methods` and docs/methods.md show it."""

    does: str
    uploads: str
    """What a client must upload beside its weights."""
    different: str
    """Does it hold for clients that started from different initialisations?"""
    convolutions: str
    residual: str
    """Does it work on networks with residual sums?"""
    cost: str
    """Time and memory on the server."""
    when: str
    """When to use it."""


class Method(Protocol):
    """A frozen dataclass of hyper-parameters. A call merges the uploads."""

    guide: ClassVar[Guide]

    @property
    def needs(self) -> frozenset[str]:
        """The statistics without which the method cannot work."""
        ...

    def __call__(self, uploads: Sequence[Upload]) -> Merged: ...


class Assembly:
    """The weights of a merged model in the dtypes of the uploads, put in one after another."""

    def __init__(self, like: Upload | Parted):
        self._like = like
        self._listed = like.listed if isinstance(like, Parted) else like.weights
        self._out: dict[str, Tensor] = {}
        self._merged: set[str] = set()

    def put(self, name: str, tensor: Tensor, own: bool = False) -> None:
        """An averaged tensor. It is copied, unless its dtype changes, or it is in memory of its own."""
        self._out[name] = tensor.to(self._listed[name].dtype, copy=not own)

    def put_matrix(self, layer: Layer, matrix: Tensor, silent: bool = False) -> None:
        """The merged matrix of a layer. It counts as averaged if no client had an input there (`silent`)."""
        parts = layer.write(matrix, self._listed)
        self._out |= parts
        if not silent:
            self._merged |= parts.keys()

    def result(self) -> Merged:
        out = {name: self._out[name] for name in self._listed}
        averaged = self._like.model_names(name for name in self._listed if name not in self._merged)
        return Merged(self._like.model_state(out), averaged=averaged)


def assemble(
    like: Upload | Parted, plain: Mapping[str, Tensor], matrices: Mapping[str, Tensor], silent: Iterable[str] = ()
) -> Merged:
    """Put together one state_dict from averaged tensors and merged matrices (by layer name), in the dtypes of the
    uploads.

    `silent` names the layers for which no client had an input.
    """
    layers: dict[str, Layer] = {layer.name: layer for layer in like.layers}
    made = Assembly(like)
    of_matrices = {part for name in matrices for part in (layers[name].weight, layers[name].bias)}
    for name in like.weights:
        if name not in of_matrices:
            made.put(name, plain[name])
    for name, matrix in matrices.items():
        made.put_matrix(layers[name], matrix, name in silent)
    return made.result()


def parts_of(uploads: Sequence[Upload]) -> list[Parted]:
    """The uploads for a method that takes one layer after the other. Files are then read part by part."""
    return uploads.parted if isinstance(uploads, Cohort) else parted(uploads)
