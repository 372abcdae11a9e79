"""Statistics with noise: what an upload may say of the data where privacy is promised.

For every class that the model knows, whether the client has it or not, up to three sums: how many examples, Σ x and
Σ x xᵀ, each x brought down to the norm `clip`. One example is in one class, so the sums of all classes together move by
no more than those of one. The noisy counts tell which classes are there: one below `PRESENT` standard deviations of its
noise is left out. All that is sent is made of noisy sums alone, the number of examples too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maecho.errors import UploadError
from maecho.linalg.gaussians import Gaussians
from maecho.linalg.symmetric import add_into
from maecho.network.forward import Pass, check_labels, examples, forward, parts
from maecho.privacy import NoisySums, Privacy
from maecho.statistics.passes.gather import Gathered, gather
from maecho.statistics.statistic import NotGathered, Setting, Statistic

PRESENT = 3.0
"""A class is there if its noisy count is above this many standard deviations of the noise."""
WIDEST = 4096
"""Length of an input up to which its d by d sums are kept."""


def gather_privately(
    setting: Setting,
    batches: Iterable[Any],
    statistics: Sequence[Statistic],
    privacy: Privacy,
    progress: bool | None = None,
) -> Gathered:
    """One pass over a client's data, as one release."""
    client = setting.client
    rest = iter(batches)
    first = next((batch for batch in rest if examples(parts(batch, client)[0])), None)
    if first is None:
        raise UploadError(f"{client}: the batches must hold at least one example, got none")
    gathered = gather(setting, [first], (), progress=False)  # for the order of the layers
    of_inputs = any(statistic.kind is Gaussians for statistic in statistics)
    sums = ClippedSums(setting, privacy.clip, gathered.found.outputs, of_inputs)
    for step in forward(setting.model, itertools.chain([first], rest), f"{client}: statistics", progress):
        sums.add(step)
    noisy = sums.release(privacy)
    values, missing = {}, {}
    for statistic in statistics:
        try:
            values[statistic.name] = statistic.of_noisy(noisy)
        except NotGathered as reason:
            missing[statistic.name] = str(reason)
    return Gathered(replace(gathered.found, examples=int(noisy.examples.sum())), values, missing)


class ClippedSums:
    """Count, Σ x and Σ x xᵀ of every class, inputs clipped, without noise: these never leave."""

    def __init__(self, setting: Setting, clip: float, outputs: int | None, of_inputs: bool):
        self._client, self._clip, self._outputs = setting.client, clip, outputs
        self._of_inputs, self._shared = of_inputs, setting.options.covariance == "shared"
        self.parts = 3 if of_inputs else 1
        """Sums that are released together."""
        self._labelled: bool | None = None
        self._shape: tuple[int, ...] = ()
        self.counts = self.totals = torch.zeros(0)
        self._squares: dict[int, Tensor] = {}

    def add(self, step: Pass) -> None:
        labels = self._labels(step)
        classes = torch.nn.functional.one_hot(labels, self._outputs if self._labelled and self._outputs else 1).double()
        first = not len(self.counts)
        self.counts = classes.sum(0) if first else self.counts + classes.sum(0)
        if not self._of_inputs:
            return
        x = self._clipped(step.inputs, first)
        self.totals = classes.T @ x if first else self.totals + classes.T @ x
        for label in [0] if self._shared else labels.unique().tolist():
            rows = x if self._shared else x[labels == label]
            add_into(self._squares, label, rows.T @ rows)

    def squares(self, label: int) -> Tensor:
        """Σ x xᵀ of a class; where classes share one covariance, of all under 0."""
        d = math.prod(self._shape)
        return self._squares.get(label, torch.zeros(d, d, dtype=torch.float64))

    def release(self, privacy: Privacy) -> NoisySums:
        """The sums with noise, of the classes that stand out of it."""
        counts = privacy.noisy(self.counts, "counts", self.parts)
        least = max(1.0, PRESENT * privacy.deviation("counts", self.parts))
        held = (counts >= least).nonzero().flatten()
        if not len(held):
            raise UploadError(
                f"{self._client}: with this much noise some class must have {least:.3g} examples to be seen, got none "
                "that has"
            )
        if not self._of_inputs:
            return NoisySums(held, counts, bool(self._labelled))
        totals = privacy.noisy(self.totals, "totals", self.parts)
        squares = [
            privacy.noisy(self.squares(label), "gram", self.parts, symmetric=True)
            for label in ([0] if self._shared else held.tolist())
        ]
        return NoisySums(held, counts, bool(self._labelled), self._shape, totals, tuple(squares))

    def _labels(self, step: Pass) -> Tensor:
        labelled = step.labels is not None
        if self._labelled not in (None, labelled):
            raise UploadError(f"{self._client}: with privacy all batches must have labels or none, got both")
        self._labelled = labelled
        if step.labels is None:
            return torch.zeros(step.size, dtype=torch.int64)
        if self._outputs is None:
            raise UploadError(
                f"{self._client}: with privacy labels must be classes of the model, one output each, got a model "
                "without such outputs"
            )
        check_labels(step.labels, self._outputs, self._client)
        return step.labels.cpu()

    def _clipped(self, x: Any, first: bool) -> Tensor:
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            raise UploadError(
                f"{self._client}: moments must be of inputs that are one tensor of real numbers, got others; "
                "echo-relay takes any, with privacy too"
            )
        shape = tuple(x.shape[1:])
        if not first and shape != self._shape:
            raise UploadError(f"{self._client}: moments must be of inputs of one shape, got {self._shape} and {shape}")
        self._shape = shape
        if math.prod(shape) > WIDEST:
            raise UploadError(
                f"{self._client}: moments with privacy must be of inputs of at most {WIDEST} numbers, got "
                f"{math.prod(shape)}"
            )
        rows = x.detach().reshape(len(x), -1).cpu().double()
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows * (self._clip / norms).clamp(max=1)
