"""Moments of the raw inputs with noise: what an upload may say of the data where privacy is promised.

For every class that the model knows, whether the client has it or not, three sums: how many examples, Σ x and Σ x xᵀ,
each x brought down to the norm `clip`. One example is in one class, so the sums of all classes together move by no more
than those of one. Which classes are there is found in the noisy counts: one below `PRESENT` standard deviations of its
noise is left out. Means, covariances and the number of examples are made of noisy sums alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from maecho.errors import UploadError
from maecho.linalg.spectra import Spectrum
from maecho.network.forward import Pass, check_labels, examples, forward, parts
from maecho.network.layers import Architecture
from maecho.privacy import Privacy
from maecho.statistics.gather import Gathered, gather
from maecho.statistics.gaussians import NO_CLASS, Covariance, Moments

ALLOWED = ("moments", "classes")
"""The statistics that can be sent with noise."""
PRESENT = 3.0
"""A class is there if its noisy count is above this many standard deviations of the noise."""
WIDEST = 4096
"""Length of an input up to which its d by d sums are kept."""


def gather_privately(
    model: nn.Module,
    architecture: Architecture,
    batches: Iterable[Any],
    wanted: Collection[str],
    client: str,
    privacy: Privacy,
    covariance: Covariance = "class",
    progress: bool | None = None,
) -> Gathered:
    """One pass over a client's data, as one release."""
    for name in wanted:
        if name not in ALLOWED:
            raise UploadError(f"{client}: with privacy the statistics must be among {', '.join(ALLOWED)}, got {name!r}")
    rest = iter(batches)
    first = next((batch for batch in rest if examples(parts(batch, client)[0])), None)
    if first is None:
        raise UploadError(f"{client}: the batches must hold at least one example, got none")
    gathered = gather(model, architecture, [first], (), client, progress=False)  # for the order of the layers
    sums = InputSums(client, privacy.clip, gathered.outputs, "moments" in wanted, covariance)
    for step in forward(model, itertools.chain([first], rest), f"{client}: statistics", progress):
        sums.add(step)
    counts = privacy.noisy(sums.counts, "counts", sums.parts)
    least = max(1.0, PRESENT * privacy.deviation("counts", sums.parts))
    held = (counts >= least).nonzero().flatten()
    if not len(held):
        raise UploadError(
            f"{client}: with this much noise some class must have {least:.3g} examples to be seen, got none that has"
        )
    rounded = torch.zeros_like(counts).index_copy(0, held, counts[held]).round().long()
    out = replace(gathered, examples=int(rounded.sum()), notes={})
    if "classes" in wanted and not sums.labelled:
        out.notes["classes"] = "the batches carry no whole-number label for every example"
    elif "classes" in wanted:
        out = replace(out, class_counts=rounded)
    if "moments" not in wanted:
        return out
    means = privacy.noisy(sums.totals, "totals", sums.parts)[held] / counts[held, None]
    moments = Moments(
        classes=held if sums.labelled else torch.tensor([NO_CLASS]),
        counts=rounded[held],
        means=means,
        covariances=_covariances(sums, privacy, counts, held, means),
        shape=sums.shape,
    )
    return replace(out, moments=moments)


class InputSums:
    """Count, Σ x and Σ x xᵀ of every class, inputs clipped, without noise: these never leave."""

    def __init__(self, client: str, clip: float, outputs: int | None, moments: bool, covariance: Covariance):
        self._client, self._clip, self._outputs = client, clip, outputs
        self._moments, self.shared = moments, covariance == "shared"
        self.parts = 3 if moments else 1
        """Sums that are released together."""
        self.labelled: bool | None = None
        self.shape: tuple[int, ...] = ()
        self.counts = self.totals = torch.zeros(0)
        self._squares: dict[int, Tensor] = {}

    def add(self, step: Pass) -> None:
        labels = self._labels(step)
        classes = torch.nn.functional.one_hot(labels, self._outputs if self.labelled and self._outputs else 1).double()
        first = not len(self.counts)
        self.counts = classes.sum(0) if first else self.counts + classes.sum(0)
        if not self._moments:
            return
        x = self._clipped(step.inputs, first)
        self.totals = classes.T @ x if first else self.totals + classes.T @ x
        for label in [0] if self.shared else labels.unique().tolist():
            rows = x if self.shared else x[labels == label]
            more = rows.T @ rows
            self._squares[label] = self._squares[label].add_(more) if label in self._squares else more

    def squares(self, label: int) -> Tensor:
        """Σ x xᵀ of a class; where classes share one covariance, of all under 0."""
        d = math.prod(self.shape)
        return self._squares.get(label, torch.zeros(d, d, dtype=torch.float64))

    def _labels(self, step: Pass) -> Tensor:
        labelled = step.labels is not None
        if self.labelled not in (None, labelled):
            raise UploadError(f"{self._client}: with privacy all batches must have labels or none, got both")
        self.labelled = labelled
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
        if not first and shape != self.shape:
            raise UploadError(f"{self._client}: moments must be of inputs of one shape, got {self.shape} and {shape}")
        self.shape = shape
        if math.prod(shape) > WIDEST:
            raise UploadError(
                f"{self._client}: moments with privacy must be of inputs of at most {WIDEST} numbers, got "
                f"{math.prod(shape)}"
            )
        rows = x.detach().reshape(len(x), -1).cpu().double()
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows * (self._clip / norms).clamp(max=1)


def _covariances(
    sums: InputSums, privacy: Privacy, counts: Tensor, held: Tensor, means: Tensor
) -> tuple[Spectrum, ...]:
    """Of each class that is there, or one for all, from noisy sums: Σ x xᵀ / n − mean meanᵀ."""
    n = counts[held]
    weights = [n] if sums.shared else list(n.diag())
    found = []
    for label, weight in zip([0] if sums.shared else held.tolist(), weights, strict=True):
        total = privacy.noisy(sums.squares(label), "gram", sums.parts)
        between = (means.mT * weight) @ means
        found.append(_semidefinite((total - between) / weight.sum()))
    return tuple(found)


def _semidefinite(A: Tensor) -> Spectrum:
    """The nearest positive semidefinite matrix. To drop small eigenvalues as well, which noise alone would have, loses
    more than it gains."""
    s, U = torch.linalg.eigh((A + A.mT) / 2)
    return Spectrum(s.flip(-1).clamp(min=0).unsqueeze(0), U.flip(-1).unsqueeze(0)).cut(int((s > 0).sum()))
