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

from maecho.aggregation.method import Guide, assemble
from maecho.errors import UploadError
from maecho.linalg.symmetric import add_into
from maecho.options import one_of
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload

HOLDS = 2
"""A client holds a class if it has at least this many examples of it. The release does not count a single example."""


class Mean:
    """A running mean of state_dicts, in float64. Whole numbers (counters) are those of the largest client."""

    def __init__(self, weighting: Literal["examples", "uniform"] = "examples"):
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
                add_into(self._sums, name, tensor.double() * p)
            elif tensor.is_complex():
                add_into(self._sums, name, tensor.to(torch.complex128) * p)
            elif largest:
                self._sums[name] = tensor
        if largest:
            self._largest = (upload.examples, upload.client)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: t / self._total if t.is_floating_point() or t.is_complex() else t for name, t in self._sums.items()
        }


class ClassAwareHead:
    """Every class's row averaged over the clients that hold that class, in float64.

    A class that nobody holds keeps the average over all.
    """

    def __init__(self, weighting: Literal["examples", "uniform"] = "uniform"):
        self.weighting = weighting
        self._sum: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, upload: Upload) -> None:
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

    weighting: Literal["examples", "uniform"] = "examples"
    head: Literal["average", "class-aware"] = "average"

    def __post_init__(self) -> None:
        one_of("weighting", self.weighting, ("examples", "uniform"))
        one_of("head", self.head, ("average", "class-aware"))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"classes"} if self.head == "class-aware" else ())

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        mean, head = Mean(self.weighting), ClassAwareHead(self.weighting)
        for upload in uploads:
            mean.add(upload)
            if self.head == "class-aware":
                head.add(upload)
        first, weights = mean.first, mean.weights()
        if self.head == "average":
            return assemble(first, weights, {})
        layer = next(layer for layer in first.layers if layer.name == first.head)
        merged = assemble(first, weights, {layer.name: head.matrix(layer.matrix(weights))})
        merged.averaged = tuple(first.model_names(first.weights))
        return merged
