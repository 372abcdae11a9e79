"""Count, mean and covariance of the raw inputs, class by class.

A Gaussian a class is all that echo-chain needs of the data. Gathered in one pass by the parallel rule of Chan, Golub
and LeVeque, so a large mean does not swallow a small variance. Where inputs are long, the scatter of a class is kept as
a short stack of rows, folded by SVD when it grows (its leading directions are what is sent anyway).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.spectra import Spectrum

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EXACT_WIDTH = 1024
"""Inputs up to this length have their full scatter matrix summed."""
SKETCH = 512
"""Directions kept of longer ones."""

NO_CLASS = -1
"""The one class of data without labels."""


@dataclass(frozen=True, eq=False)
class Moments:
    """What a client says about its raw inputs: one Gaussian a class."""

    classes: Int[Tensor, " k"]
    counts: Int[Tensor, " k"]
    means: Float[Tensor, "k d"]
    covariances: Spectrum
    """One group a class."""
    shape: tuple[int, ...]
    """Of one input, before it was flattened to d."""

    def __post_init__(self) -> None:
        wrong = self.covariances.malformed()
        if wrong:
            raise ValueError(f"class covariances must be {wrong}")
        if self.means.dim() != 2 or self.classes.dim() != 1 or self.counts.dim() != 1:
            raise ValueError(f"class means must be [classes, inputs], got shape {tuple(self.means.shape)}")
        k, d = self.means.shape
        if not (len(self.classes) == len(self.counts) == len(self.covariances.values) == k):
            raise ValueError(f"moments must speak of the same classes throughout, got means of {k}")
        if d != self.covariances.width or d != int(torch.tensor(self.shape).prod()):
            raise ValueError(f"moments must be of inputs of shape {self.shape}, got means of length {d}")

    @property
    def bytes(self) -> int:
        plain = (self.classes, self.counts, self.means)
        return sum(t.numel() * t.element_size() for t in plain) + self.covariances.bytes


class Scatter:
    """Count, mean and Σ (x − mean)(x − mean)ᵀ of one class, a batch at a time, in float64."""

    def __init__(self, d: int):
        self.count = 0
        self.mean = torch.zeros(d, dtype=torch.float64)
        self._exact = d <= EXACT_WIDTH
        self._scatter = torch.zeros((d, d) if self._exact else (0, d), dtype=torch.float64)

    def add(self, x: Float[Tensor, "n d"]) -> None:
        n = len(x)
        x = x.to(self.mean)
        batch_mean = x.mean(0)
        gap = batch_mean - self.mean
        total = self.count + n
        rows = torch.cat([x - batch_mean, gap.unsqueeze(0) * (self.count * n / total) ** 0.5])
        self.mean = self.mean + gap * (n / total)
        self.count = total
        if self._exact:
            self._scatter += rows.T @ rows
        else:
            self._scatter = torch.cat([self._scatter, rows])
            if len(self._scatter) >= 2 * SKETCH:
                self._fold()

    def _fold(self) -> None:
        spectrum = Spectrum.of_dense((self._scatter @ self._scatter.T).unsqueeze(0), SKETCH)
        assert spectrum.basis is not None
        self._scatter = spectrum.basis[0].T @ self._scatter

    def covariance(self) -> Spectrum:
        if self._exact:
            return Spectrum.of_dense(self._scatter.unsqueeze(0) / self.count)
        self._fold()
        weights = torch.full((1, len(self._scatter)), 1 / self.count, dtype=torch.float64)
        return Spectrum.of_factor(self._scatter.T.unsqueeze(0), weights)


class ClassScatter:
    """A Scatter for every class that turns up."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self._classes: dict[int, Scatter] = {}

    def add(self, x: Tensor, labels: Tensor | None) -> None:
        self.shape = tuple(x.shape[1:])
        x = x.reshape(len(x), -1)
        if labels is None:
            labels = torch.full((len(x),), NO_CLASS)
        labels = labels.to(x.device)
        for label in labels.unique().tolist():
            self._classes.setdefault(label, Scatter(x.shape[1])).add(x[labels == label].cpu())

    def moments(self) -> Moments:
        assert self.shape is not None
        labels = sorted(self._classes)
        parts = [self._classes[label].covariance() for label in labels]
        rank = max(part.rank for part in parts)
        return Moments(
            classes=torch.tensor(labels),
            counts=torch.tensor([self._classes[label].count for label in labels]),
            means=torch.stack([self._classes[label].mean for label in labels]),
            covariances=Spectrum(
                torch.cat([_widen(part.values, rank) for part in parts]),
                torch.cat([_widen(part.basis, rank) for part in parts if part.basis is not None]),
            ),
            shape=self.shape,
        )


def _widen(tensor: Tensor, rank: int) -> Tensor:
    """Zero columns up to the common rank: eigenvalue 0, so their direction does not matter."""
    return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:-1], rank - tensor.shape[-1])], -1)
