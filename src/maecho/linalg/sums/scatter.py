"""Count, mean and scatter matrix of rows that come in batches.

The parallel rule of Chan, Golub and LeVeque joins the batches, so round-off in a large mean does not hide a small
variance. For long rows the scatter matrix is kept as a short stack of rows. When the stack is full, an SVD reduces it
to its leading directions, which are all that is sent anyway. The variance of every coordinate stays exact.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.leading import Leading, leading
from maecho.linalg.spectra import Spectrum
from maecho.linalg.sums.products import SquareSums, single

if TYPE_CHECKING:
    from jaxtyping import Float

EXACT_WIDTH = 1024
"""Rows up to this length get a full scatter matrix."""
EXACT_ON_GPU = 4096
"""The same limit on a GPU, where large products cost little and many small eigenproblems cost much."""
SKETCH = 512
"""How many directions are kept for longer rows."""


class Scatter:
    """Sums up count, mean and Σ (x − mean)(x − mean)ᵀ batch by batch, in float64, on the device of the inputs."""

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None):
        d = math.prod(shape)
        self.shape, self.count = shape, 0
        self.mean = torch.zeros(d, dtype=torch.float64, device=device)
        self._exact = d <= (EXACT_WIDTH if self.mean.device.type == "cpu" else EXACT_ON_GPU)
        self._sums = SquareSums(1, d, self.mean.device) if self._exact else None
        self._scatter = torch.zeros(0, d, dtype=torch.float64, device=device)
        self._squares = torch.zeros(2, d, dtype=torch.float64, device=device)  # of entries and of cosines

    def add(self, x: Float[Tensor, "n d"]) -> None:
        n, precise = len(x), not single(x, x.shape[1])
        x = x.to(self.mean)
        batch_mean = x.mean(0)
        gap = batch_mean - self.mean
        total = self.count + n
        rows = torch.cat([gap.unsqueeze(0) * (self.count * n / total) ** 0.5, x - batch_mean])
        if self._sums is None:
            self._add_rows(rows)
        else:
            self._sums.add((rows if precise else rows.float()).unsqueeze(0))
        self.mean = self.mean + gap * (n / total)
        self.count = total

    def add_scatter(self, other: Scatter) -> None:
        """Add another scatter matrix, which is around its own mean. The means are not compared."""
        if self._sums is not None and other._sums is not None:
            self._sums.add_sums(other._sums.dense(), other.count)
        else:
            self._stack(other._scatter)
            self._squares += other._squares
        self.count += other.count

    def _add_rows(self, rows: Tensor) -> None:
        self._stack(rows)
        self._squares[0] += rows.square().sum(0)
        if len(self.shape) > 1:
            self._squares[1] += cosines.forth(rows, self.shape).square().sum(0)

    def _stack(self, rows: Tensor) -> None:
        self._scatter = torch.cat([self._scatter, rows])
        if len(self._scatter) >= 2 * SKETCH:
            self._fold()

    def _fold(self) -> None:
        spectrum = Spectrum.of_dense((self._scatter @ self._scatter.T).unsqueeze(0), SKETCH)
        self._scatter = spectrum.basis[0].T @ self._scatter

    def covariance(self, enough: int | None = None) -> Spectrum:
        """The scatter matrix divided by the count. `enough`: how many directions are wanted; by default all."""
        if self._sums is not None:
            return leading(self._sums.dense() / self.count, enough, keep_rest=False)
        self._fold()
        weights = self._scatter.new_full((1, len(self._scatter)), 1 / self.count)
        return Spectrum.of_factor(self._scatter.T.unsqueeze(0), weights)

    def lost(self, held: Spectrum) -> Float[Tensor, "2 d"] | None:
        """The variances, of entries and of cosines, that are in the scatter matrix and not in the covariance that
        `covariance` gave. None if it holds all."""
        if self._sums is None:
            return self.folded_away()
        if not isinstance(held, Leading):
            return None
        A = self._sums.dense()[0] / self.count
        rows = held.basis[0].to(A).mT
        lost = torch.zeros(2, len(A), dtype=A.dtype, device=A.device)
        lost[0] = A.diagonal() - held.values[0].to(A) @ rows.square()
        if len(self.shape) > 1:
            both = cosines.forth(cosines.forth(A, self.shape).T, self.shape)
            lost[1] = both.diagonal() - held.values[0].to(A) @ cosines.forth(rows, self.shape).square()
        return lost.clamp(min=0)

    def folded_away(self) -> Float[Tensor, "2 d"] | None:
        """The variances, of entries and of cosines, that folding has lost. None for an exact scatter matrix."""
        if self._exact:
            return None
        self._fold()  # as `covariance` does
        rows = self._scatter
        held = [rows.square().sum(0), torch.zeros_like(self.mean)]
        if len(self.shape) > 1:
            held[1] = cosines.forth(rows, self.shape).square().sum(0)
        lost = self._squares - torch.stack(held)
        return lost.where(lost > 1e-9 * self._squares, 0.0) / self.count  # a smaller loss is round-off
