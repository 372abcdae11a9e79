"""What a method is: frozen hyper-parameters that can be called, with a guide for those who have to choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from maecho.network.layers import Layer
from maecho.upload.merged import Merged
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


def assemble(
    like: Upload,
    plain: Mapping[str, Tensor],
    matrices: Mapping[str, Tensor],
    silent: Iterable[str] = (),
    own: bool = False,
) -> Merged:
    """Put together one state_dict from averaged tensors and merged matrices (by layer name), in the dtypes of the
    uploads.

    `silent` names the layers for which no client had an input. `own` says that the averaged tensors are in memory that
    nobody else uses.
    """
    layers: dict[str, Layer] = {layer.name: layer for layer in like.layers}
    out = {name: plain[name].to(tensor.dtype, copy=not own) for name, tensor in like.weights.items()}
    merged: set[str] = set()
    for name, matrix in matrices.items():
        parts = layers[name].write(matrix, like.weights)
        out |= parts
        if name not in silent:
            merged |= parts.keys()
    out |= {alias: out[kept] for alias, kept in like.aliases.items()}
    return Merged(out, averaged=[name for name in like.weights if name not in merged])
