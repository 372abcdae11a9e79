"""Statistics with noise, for uploads that promise differential privacy.

For every class of the model, whether the client has it or not, there are up to three sums: the number of examples, Σ x
and Σ x xᵀ. Each x is scaled down to the norm `clip` first. An example belongs to one class. So one example changes the
sums of all classes together by no more than those of one class. A class is left out if its noisy count is below
`PRESENT` standard deviations of the noise. All that is sent, including the number of examples, is computed from the
noisy sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maecho.errors import InputError
from maecho.linalg.symmetric import add_into
from maecho.network.batches.inputs import stand_in
from maecho.network.batches.labels import NO_LABELS, check_labels
from maecho.network.batches.reading import Reader
from maecho.network.forward import Pass, forward
from maecho.network.verified import Peeked
from maecho.privacy import NoisySums, Privacy
from maecho.statistics.passes.gather import Gathered, gather
from maecho.statistics.statistic import NotGathered, Setting, Statistic

PRESENT = 3.0
"""A class counts as present if its noisy count is at least this many standard deviations of the noise."""
WIDEST = 4096
"""The most numbers of an input. Longer inputs are refused, since their d by d sums take too much memory."""


def gather_privately(
    setting: Setting,
    batches: Iterable[Any],
    statistics: Sequence[Statistic],
    privacy: Privacy,
    progress: bool | None = None,
) -> Gathered:
    """Pass over a client's data once. All that it gives is one release."""
    client = setting.client
    reader = setting.reader or Reader(setting.model, client)
    rest = batches if isinstance(batches, Peeked) else Peeked(batches, reader)
    first = rest.first
    if first is None:
        raise InputError(f"{client}: the batches must hold at least one example, got none")
    gathered = gather(replace(setting, reader=reader), [first], (), progress=False)  # for the order of the layers
    of_inputs = any(statistic.of_inputs for statistic in statistics)
    sums = ClippedSums(setting, privacy.clip, gathered.found.outputs, of_inputs)
    every = itertools.chain([first], rest)
    for step in forward(setting.model, every, f"{client}: statistics", progress, reader=reader):
        if step.no_labels not in ("", NO_LABELS):
            reader.lost_labels(step.no_labels)
        sums.add(step)
    noisy = sums.release(privacy)
    values, missing = {}, {}
    for statistic in statistics:
        try:
            values[statistic.name] = statistic.of_noisy(noisy)
        except NotGathered as reason:
            missing[statistic.name] = str(reason)
    # The neuron spaces are tried on drawn inputs, so that what holds says nothing about the data.
    found = replace(gathered.found, examples=int(noisy.examples.sum()))
    return replace(gathered, found=found, values=values, missing=missing, inputs=stand_in(gathered.inputs))


class ClippedSums:
    """Sums up count, Σ x and Σ x xᵀ of every class from clipped inputs. These sums have no noise and are never sent."""

    def __init__(self, setting: Setting, clip: float, outputs: int | None, of_inputs: bool):
        self._client, self._clip, self._outputs = setting.client, clip, outputs
        self._of_inputs, self._shared = of_inputs, setting.options.covariance == "shared"
        self.parts = 3 if of_inputs else 1
        """How many sums are released together."""
        self._labelled: bool | None = None
        self._no_labels = ""
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
        """Σ x xᵀ of a class. If the classes share one covariance, the sum of all classes has the label 0."""
        d = math.prod(self._shape)
        return self._squares.get(label, torch.zeros(d, d, dtype=torch.float64))

    def release(self, privacy: Privacy) -> NoisySums:
        """The sums with noise, of the classes whose counts are clearly above the noise."""
        counts = privacy.noisy(self.counts, "counts", self.parts)
        least = max(1.0, PRESENT * privacy.deviation("counts", self.parts))
        held = (counts >= least).nonzero().flatten()
        if not len(held):
            raise InputError(
                f"{self._client}: with this much noise some class must have at least {least:.3g} examples, got none "
                "that large"
            )
        if not self._of_inputs:
            return NoisySums(held, counts, self._no_labels)
        totals = privacy.noisy(self.totals, "totals", self.parts)
        squares = [
            privacy.noisy(self.squares(label), "gram", self.parts, symmetric=True)
            for label in ([0] if self._shared else held.tolist())
        ]
        return NoisySums(held, counts, self._no_labels, self._shape, totals, tuple(squares))

    def _labels(self, step: Pass) -> Tensor:
        labelled = step.labels is not None
        if self._labelled not in (None, labelled):
            raise InputError(f"{self._client}: with privacy all batches or none must have labels, got both kinds")
        self._labelled, self._no_labels = labelled, step.no_labels
        if step.labels is None:
            return torch.zeros(step.size, dtype=torch.int64)
        if self._outputs is None:
            raise InputError(
                f"{self._client}: with privacy labels must be classes of the model, one output each, got a model "
                "without such outputs"
            )
        check_labels(step.labels, self._outputs, self._client)
        return step.labels.cpu()

    def _clipped(self, x: Any, first: bool) -> Tensor:
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            raise InputError(
                f"{self._client}: for moments the inputs must be one tensor of real numbers, got others; echo-relay "
                "takes any inputs, with privacy too"
            )
        shape = tuple(x.shape[1:])
        if not first and shape != self._shape:
            raise InputError(
                f"{self._client}: for moments all inputs must have one shape, got {self._shape} and {shape}"
            )
        self._shape = shape
        if math.prod(shape) > WIDEST:
            raise InputError(
                f"{self._client}: for moments with privacy an input must have at most {WIDEST} numbers, got "
                f"{math.prod(shape)}"
            )
        rows = x.detach().reshape(len(x), -1).cpu().double()
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows * (self._clip / norms).clamp(max=1)
