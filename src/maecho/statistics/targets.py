"""The inputs of the last layer, summed class by class: Σ Yᵀ X with Y the labels as unit rows.

Beside the Gram Σ Xᵀ X it is all that a ridge regression of the labels on those inputs needs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maecho.network import kinds, layers
from maecho.network.forward import Pass, check_labels


class Targets:
    """Gathered a batch at a time, in float64."""

    def __init__(self) -> None:
        self._seen: tuple[str, Tensor] | None = None
        self._uses = 0
        self._layer: str | None = None
        self._sums: Tensor | None = None
        self.reason: str | None = None
        """Why there are none."""

    def see(self, module: nn.Module, layer: layers.Layer, x: Tensor) -> None:
        """What reaches a layer; of one batch the last counts."""
        same = self._seen is not None and self._seen[0] == layer.name
        self._uses = self._uses + 1 if same else 1
        found = kinds.rows(module, x.detach())
        self._seen = (layer.name, layers.complete(found, layer) if found.is_floating_point() else found)

    def add(self, step: Pass, client: str) -> None:
        seen, self._seen = self._seen, None
        self.reason = self.reason or self._complaint(step, seen)
        if self.reason:
            return
        assert seen is not None
        assert step.labels is not None
        check_labels(step.labels, step.output.shape[-1], client)
        self._layer, rows = seen[0], seen[1][0]
        if self._sums is None:
            self._sums = torch.zeros(step.output.shape[-1], rows.shape[-1], dtype=torch.float64, device=rows.device)
        self._sums.index_add_(0, step.labels.to(rows.device), rows)

    def _complaint(self, step: Pass, seen: tuple[str, Tensor] | None) -> str | None:
        if step.labels is None:
            return "the batches carry no whole-number label for every example"
        if not (isinstance(step.output, Tensor) and step.output.dim() == 2):
            return "the model's output is not one row of class scores an example"
        one_row_each = seen is not None and seen[1].dim() == 3 and seen[1].shape[:2] == (1, step.size)
        if seen is None or self._uses != 1 or not one_row_each:
            return "the last layer is not used once, on one row an example"
        return None if self._layer in (None, seen[0]) else "the last layer is not the same for every batch"

    def sums(self) -> tuple[str, Tensor] | None:
        return None if self._layer is None or self._sums is None else (self._layer, self._sums.cpu())
