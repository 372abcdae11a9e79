"""The statistic "classes": how many examples of each class a client has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from maecho.errors import UploadError
from maecho.formatting import numbers
from maecho.network.forward import Pass, check_labels
from maecho.network.layers import find
from maecho.privacy import NoisySums
from maecho.statistics.parts import COUNTS, is_whole
from maecho.statistics.statistic import Carrier, Found, Gatherer, NotGathered, Options, Setting, Statistic

NO_LABELS = "the batches carry no whole-number label for every example"


class Classes(Statistic):
    """One whole number for each of the model's outputs."""

    name = "classes"
    kind = COUNTS
    reveals = "How many examples of each class the client has."
    by_default = additive = private = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Counts(setting.client)

    def recipe(self, options: Options) -> str:
        return "number of examples of each class"

    def of_noisy(self, sums: NoisySums) -> Tensor:
        if not sums.labelled:
            raise NotGathered(NO_LABELS)
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
    def __init__(self, client: str):
        self._client = client
        self._counts: Tensor | None = None
        self._labelled = True

    def add(self, step: Pass) -> None:
        self._labelled = self._labelled and step.labels is not None
        if step.labels is None or not (isinstance(step.output, Tensor) and step.output.dim() == 2):
            return
        classes = step.output.shape[-1]
        check_labels(step.labels, classes, self._client)
        counts = step.labels.cpu().bincount(minlength=classes)
        self._counts = counts if self._counts is None else self._counts + counts

    def value(self, found: Found) -> Tensor:
        if self._counts is None or not self._labelled:
            raise NotGathered(NO_LABELS)
        return self._counts
