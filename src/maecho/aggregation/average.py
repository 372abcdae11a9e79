"""Averages: FedAvg, the class-aware head, and the mean that every method takes of parameters without an input matrix.

    W = Σ_i p_i W_i,    p_i = n_i / Σ n  or  1/N

(McMahan et al., AISTATS 2017.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from maecho.aggregation.method import Assembly, Guide, parts_of
from maecho.errors import UploadError
from maecho.network.layers import Layer
from maecho.options import one_of
from maecho.upload.merged import Merged
from maecho.upload.parted import Parted
from maecho.upload.upload import Upload

Weighting = Literal["examples", "uniform"]
HOLDS = 2
"""A client holds a class if it has at least this many examples of it. The release does not count a single example."""


class Mean:
    """A running mean of state_dicts, in float64. Whole numbers (counters) are those of the largest client."""

    def __init__(self, weighting: Weighting = "examples"):
        self.weighting = weighting
        self._first: Upload | None = None
        self._sums: dict[str, Tensor] = {}
        self._total = 0.0
        self._largest = (0, "")

    @property
    def first(self) -> Upload:
        """The upload that was added first. A merged model has its names, shapes and dtypes."""
        assert self._first is not None
        return self._first

    def add(self, upload: Upload) -> None:
        self._first = self._first or upload
        p = upload.examples if self.weighting == "examples" else 1
        # Of equally large clients the name decides, so that the result does not depend on the order of the clients.
        largest = (upload.examples, upload.client) > self._largest
        self._total += p
        for name, tensor in upload.weights.items():
            if tensor.is_floating_point():
                add_product(self._sums, name, tensor, p)
            elif largest:
                self._sums[name] = tensor
        if largest:
            self._largest = (upload.examples, upload.client)

    def weights(self) -> dict[str, Tensor]:
        """The means. This ends the adding, since they take the place of the sums."""
        for tensor in self._sums.values():
            if tensor.is_floating_point():
                tensor.div_(self._total)
        self._total = 1.0
        return dict(self._sums)


def average(uploads: Sequence[Parted], name: str, weighting: Weighting = "examples") -> Tensor:
    """The mean of one tensor over all uploads, in float64. Of whole numbers (counters): that of the largest client."""
    if not uploads[0].listed[name].is_floating_point():
        return largest(uploads).weights[name]
    sums: dict[str, Tensor] = {}
    for upload, p in zip(uploads, shares(uploads, weighting), strict=True):
        add_product(sums, name, upload.weights[name], p)
    return sums[name]


def shares(uploads: Sequence[Parted], weighting: Weighting = "examples") -> list[float]:
    """How much each client counts: p_i."""
    sizes = [upload.examples if weighting == "examples" else 1 for upload in uploads]
    total = sum(sizes)
    return [size / total for size in sizes]


def largest(uploads: Sequence[Parted]) -> Parted:
    """The largest client. Of equally large ones the name decides, so that the order of the clients does not matter."""
    return max(uploads, key=lambda upload: (upload.examples, upload.client))


def add_product(sums: dict[str, Tensor], name: str, tensor: Tensor, factor: float) -> None:
    """sums[name] += factor · tensor, in float64 and without a copy of the tensor in float64."""
    if name not in sums:
        sums[name] = torch.zeros_like(tensor, dtype=torch.float64, memory_format=torch.contiguous_format)
    sums[name].add_(tensor, alpha=factor)


class ClassAwareHead:
    """Every class's row averaged over the clients that hold that class, in float64.

    A class that nobody holds keeps the average over all.
    """

    def __init__(self, weighting: Weighting = "uniform"):
        self.weighting = weighting
        self._sum: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, upload: Upload | Parted) -> None:
        counts = upload.statistics.get("classes")
        if upload.head is None or counts is None:
            raise UploadError(
                f"{upload.client}: a class-aware head needs class counts and a last layer of one row a class, "
                f"got {'no last layer' if upload.head is None else 'no counts'}"
            )
        W = next(layer for layer in upload.layers if layer.name == upload.head).matrix(upload.weights).double()
        weight = (counts >= HOLDS).double()
        if self.weighting == "examples":
            weight = weight * counts
        weight = weight.to(W)[:, None]
        self._sum = W * weight if self._sum is None else self._sum + W * weight
        self._weight = weight if self._weight is None else self._weight + weight

    def matrix(self, average: Tensor) -> Tensor:
        assert self._sum is not None
        assert self._weight is not None
        held = self._weight > 0
        return torch.where(held, self._sum / self._weight.where(held, torch.ones_like(self._weight)), average)


@dataclass(frozen=True)
class FedAvg:
    """The average of the models, layer by layer.

    Args:
        weighting: "examples" weights each client by its number of examples. "uniform" weights all clients alike.
        head: "average" averages the last layer like the rest. "class-aware" averages each class's row over the clients
            that hold the class (the release's baseline).
    """

    guide: ClassVar[Guide] = Guide(
        does=(
            "averages the models, by number of examples or uniformly; `head=class-aware` averages each class's "
            "row over the clients that have the class"
        ),
        uploads="nothing (class counts for that head)",
        different="no",
        convolutions="yes",
        residual="yes",
        cost="one pass; memory of one upload",
        when="as the baseline, or for models that are nearly alike",
    )

    weighting: Weighting = "examples"
    head: Literal["average", "class-aware"] = "average"

    def __post_init__(self) -> None:
        one_of("weighting", self.weighting, ("examples", "uniform"))
        one_of("head", self.head, ("average", "class-aware"))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"classes"} if self.head == "class-aware" else ())

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        given = parts_of(uploads)
        made = Assembly(given[0])
        for name in given[0].listed:
            made.put(name, average(given, name, self.weighting))
        if self.head == "class-aware":
            head = ClassAwareHead(self.weighting)
            for upload in given:
                head.add(upload)
            layer = next(layer for layer in given[0].layers if layer.name == given[0].head)
            made.put_matrix(layer, head.matrix(layer_average(given, layer, self.weighting)), silent=True)
        return made.result()


def layer_average(uploads: Sequence[Parted], layer: Layer, weighting: Weighting = "examples") -> Tensor:
    """The mean of a layer's matrix [W b] over all uploads, in float64."""
    names = [name for name in (layer.weight, layer.bias) if name is not None]
    return layer.matrix({name: average(uploads, name, weighting) for name in names})
