"""The statistic "targets", the inputs of the last layer summed class by class: Σ Yᵀ X with Y the labels as unit rows.

With this and the Gram matrix Σ Xᵀ X, the labels can be fitted to those inputs by ridge regression.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from maecho.errors import UploadError
from maecho.linalg.finite import is_finite
from maecho.linalg.symmetric import TOLERANCE
from maecho.network import kinds
from maecho.network.forward import Pass
from maecho.network.layers import Layer, complete, find
from maecho.network.spaces import Move, Place
from maecho.statistics.classes import NO_SCORES
from maecho.statistics.parts import check_real
from maecho.statistics.statistic import Carrier, Found, Gatherer, NotGathered, Options, Setting, Statistic


class Targets(Statistic):
    """One matrix [classes, inputs of the last layer]."""

    name = "targets"
    reveals = (
        "Sums of what reaches the last layer, class by class: with the counts, the average features of every class. "
        "The sum of one example is that example's features."
    )
    additive = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Sums()

    def recipe(self, options: Options) -> str:
        return "sum of the inputs of the last layer, class by class"

    def check(self, value: Any, carrier: Carrier) -> Any:
        client, head = carrier.client, find(carrier.layers, carrier.head)
        if head is None:
            raise UploadError(f"{client}: targets must come with a head, got none")
        expected = head.shape(carrier.weights)[1:]
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            got = tuple(value.shape) if isinstance(value, Tensor) else value
            raise UploadError(f"{client}: targets must be {expected}, classes by inputs of the head, got {got}")
        check_real(f"{client}: targets", value)
        if not is_finite(value):
            raise UploadError(f"{client}: targets must be finite, got NaN or infinity")
        counted = float(value[:, -1].double().sum())
        if head.bias is not None and not math.isclose(counted, carrier.examples, rel_tol=TOLERANCE):
            raise UploadError(
                f"{client}: targets must count its {carrier.examples} examples in the column of the bias, "
                f"got {counted:.6g}"
            )
        return value

    def warnings(self, value: Any, carrier: Carrier) -> list[str]:
        counts = carrier.statistics.get("classes")
        single = [str(label) for label, count in enumerate([] if counts is None else counts.tolist()) if count == 1]
        return [f"1 example of class {', '.join(single)}: its row of targets IS its features"] if single else []

    def moved(self, value: Any, carrier: Carrier, move: Move) -> Any:
        for layer in move.layers(carrier.layers, outputs=False):
            if layer.name == carrier.head:
                columns = value.shape[1] - (layer.bias is not None)
                place = Place(layer.weight, 1, columns // move.space.size)
                value = torch.cat([move.carry(value[:, :columns], place), value[:, columns:]], 1)
        return value


class _Sums(Gatherer):
    """Sums up the rows of each class, in float64."""

    def __init__(self) -> None:
        self._seen: tuple[str, Tensor] | None = None
        self._order: dict[str, None] = {}
        self._uses = 0
        self._layer: str | None = None
        self._sums: Tensor | None = None
        self._reason = ""

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        """Keep the input of the last layer: the one whose first run comes after the first runs of all others."""
        self._order.setdefault(layer.name)
        if layer.name != next(reversed(self._order)):
            return
        same = self._seen is not None and self._seen[0] == layer.name
        self._uses = self._uses + 1 if same else 1
        found = kinds.rows(module, x.detach())
        # A copy, since a later module may write into what came in here.
        self._seen = (layer.name, complete(found, layer).clone() if found.is_floating_point() else found)

    def add(self, step: Pass) -> None:
        seen, self._seen = self._seen, None
        self._reason = self._reason or self._complaint(step, seen)
        if self._reason:
            return
        assert seen is not None
        assert step.labels is not None
        self._layer, rows = seen[0], seen[1][0]
        if self._sums is None:
            self._sums = torch.zeros(step.output.shape[-1], rows.shape[-1], dtype=torch.float64, device=rows.device)
        self._sums.index_add_(0, step.labels.to(rows.device), rows)

    def _complaint(self, step: Pass, seen: tuple[str, Tensor] | None) -> str:
        if step.labels is None:
            return step.no_labels
        if not (isinstance(step.output, Tensor) and step.output.dim() == 2):
            return NO_SCORES
        one_row_each = seen is not None and seen[1].dim() == 3 and seen[1].shape[:2] == (1, step.size)
        if seen is None or self._uses != 1 or not one_row_each:
            return "the last layer does not run exactly once, on one row for each example"
        return "" if self._layer in (None, seen[0]) else "the last layer is not the same for every batch"

    def value(self, found: Found) -> Tensor:
        if self._reason:
            raise NotGathered(self._reason)
        if self._sums is None or self._layer != found.head:
            raise NotGathered("the model has no last layer with one row for each class")
        return self._sums.cpu()
