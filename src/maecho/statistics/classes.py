"""The statistic "classes": how many examples of each class a client has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from maecho.errors import UploadError
from maecho.formatting import numbers
from maecho.network.batches.labels import NO_LABELS
from maecho.network.forward import Pass
from maecho.network.layers import find
from maecho.privacy import NoisySums
from maecho.statistics.parts import COUNTS, is_whole
from maecho.statistics.statistic import Carrier, Found, Gatherer, NotGathered, Options, Setting, Statistic

NO_SCORES = "the model's output is not one row of class scores an example"


class Classes(Statistic):
    """One whole number for each of the model's outputs."""

    name = "classes"
    kind = COUNTS
    reveals = "How many examples of each class the client has."
    by_default = additive = private = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Counts()

    def recipe(self, options: Options) -> str:
        return "number of examples of each class"

    def of_noisy(self, sums: NoisySums) -> Tensor:
        if sums.no_labels:
            raise NotGathered(sums.no_labels)
        return sums.examples

    def check(self, value: Any, carrier: Carrier) -> Any:
        client = carrier.client
        whole = isinstance(value, Tensor) and value.dim() == 1 and is_whole(value)
        if not whole or bool((value < 0).any()):
            got = numbers(value) if isinstance(value, Tensor) else type(value).__name__
            raise UploadError(
                f"{client}: class counts must be one whole number for each class, none negative, got {got}"
            )
        head = find(carrier.layers, carrier.head)
        if head is not None and len(value) != head.shape(carrier.weights)[1]:
            classes = head.shape(carrier.weights)[1]
            raise UploadError(f"{client}: class counts must be of the {classes} classes of the head, got {len(value)}")
        counted = sum(value.tolist())  # in Python, since torch's sums wrap at 2**63
        if counted != carrier.examples:
            raise UploadError(f"{client}: class counts must sum to its {carrier.examples} examples, got {counted}")
        return value


class _Counts(Gatherer):
    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._reason = ""

    def add(self, step: Pass) -> None:
        if step.labels is None:
            self._reason = self._reason or step.no_labels
        elif not (isinstance(step.output, Tensor) and step.output.dim() == 2):
            self._reason = self._reason or NO_SCORES
        else:
            counts = step.labels.cpu().bincount(minlength=step.output.shape[-1])
            self._counts = counts if self._counts is None else self._counts + counts

    def value(self, found: Found) -> Tensor:
        if self._counts is None or self._reason:
            raise NotGathered(self._reason or NO_LABELS)
        return self._counts
