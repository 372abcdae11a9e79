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
from maecho.linalg.means import RunningMean, as_working, has_mean, pieces, working
from maecho.network.layers import Layer
from maecho.options import one_of
from maecho.upload.cohort import in_memory
from maecho.upload.merged import Merged
from maecho.upload.parted import Parted
from maecho.upload.upload import Upload

Weighting = Literal["examples", "uniform"]
HOLDS = 2
"""A client holds a class if it has at least this many examples of it. The release does not count a single example."""


class Mean:
    """A running mean of state_dicts. Whole numbers (counters) are those of the largest client."""

    def __init__(self, weighting: Weighting = "examples"):
        self.weighting = weighting
        self._first: Upload | None = None
        self._running = RunningMean()
        self._names: list[str] = []
        self._whole: dict[str, Tensor] = {}
        self._largest = (0, "")
        self._count = 0

    @property
    def first(self) -> Upload:
        """The upload that was added first. A merged model has its names, shapes and dtypes."""
        assert self._first is not None
        return self._first

    def add(self, upload: Upload) -> None:
        if self._first is None:
            self._first = upload
            self._names = [name for name, tensor in upload.weights.items() if has_mean(tensor)]
        self._count += 1
        self._running.add([as_working(upload.weights[name]) for name in self._names], count_of(upload, self.weighting))
        if size(upload) > self._largest:
            self._largest = size(upload)
            self._whole = {name: t for name, t in upload.weights.items() if not has_mean(t)}

    def weights(self) -> dict[str, Tensor]:
        """All means in float64 (or complex128), to go on with. Like `state`, in new memory."""
        return {name: t.double() if t.is_floating_point() else t for name, t in self._found().items()}

    def state(self) -> dict[str, Tensor]:
        """All means in the dtypes of the uploads."""
        return {name: tensor.to(self.first.weights[name].dtype) for name, tensor in self._found().items()}

    def _found(self) -> dict[str, Tensor]:
        found = dict(zip(self._names, self._running.result()[0], strict=True)) if self._names else {}
        # The mean of a single tensor is that tensor itself.
        means = {name: tensor.to(tensor.dtype, copy=self._count == 1) for name, tensor in found.items()}
        return {name: means[name] if name in means else self._whole[name].clone() for name in self.first.weights}


def size(upload: Upload | Parted) -> tuple[int, str]:
    """Of equally large clients the name decides, so that the result does not depend on the order of the clients."""
    return upload.examples, upload.client


def count_of(upload: Upload | Parted, weighting: Weighting = "examples") -> float:
    """How much an upload counts in an average."""
    return float(upload.examples) if weighting == "examples" else 1.0


def shares(uploads: Sequence[Parted], weighting: Weighting = "examples") -> list[float]:
    """The share of each client in an average: p_i."""
    counts = [count_of(upload, weighting) for upload in uploads]
    return [count / sum(counts) for count in counts]


def average(uploads: Sequence[Parted], name: str, weighting: Weighting = "examples") -> Tensor:
    """The mean of one tensor, at least in float32. Of whole numbers (counters): that of the largest client."""
    if not has_mean(uploads[0].listed[name]):
        return max(uploads, key=size).weights[name]
    running = RunningMean()
    for upload in uploads:
        running.add([as_working(upload.weights[name])], count_of(upload, weighting))
    return running.result()[0][0]


def averages(held: Sequence[Upload], weighting: Weighting = "examples") -> dict[str, Tensor]:
    """The means of all weights of uploads in memory, in their dtypes and in new memory.

    A few numbers of all uploads are averaged together, which takes no memory beside the result's.
    """
    shares = [count_of(upload, weighting) for upload in held]
    out = {name: torch.empty_like(tensor) for name, tensor in held[0].weights.items()}
    means = {name: [out[name], *(upload.weights[name] for upload in held)] for name in out}
    for name in [name for name, tensor in out.items() if not has_mean(tensor)]:
        out[name].copy_(max(held, key=size).weights[name])
        del means[name]
    for together in pieces(means):
        places = [piece.of(out[piece.name]) for piece in together]
        ready = all(place.dtype is working(place.dtype) for place in places)
        running = RunningMean(places if ready else None)
        for upload, share in zip(held, shares, strict=True):
            running.add([as_working(piece.of(upload.weights[piece.name])) for piece in together], share)
        for place, found in zip(places, running.result()[0], strict=True):
            if found is not place:
                place.copy_(found)
    return out


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
        held = in_memory(uploads)
        for name, tensor in averages(held, self.weighting).items() if held else ():
            made.put(name, tensor, own=True)
        for name in given[0].listed if not held else ():
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
    return layer.matrix({name: average(uploads, name, weighting).double() for name in names})
