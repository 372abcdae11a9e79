"""Moments of a client's inputs, gathered in one pass.

By the parallel rule of Chan, Golub and LeVeque, so a large mean does not swallow a small variance. Where inputs are
long, the scatter of a class is kept as a short stack of rows, folded by SVD when it grows (its leading directions are
what is sent anyway), beside the variance of every coordinate, which is exact. With several Gaussians a class, k-means
on its first examples decides which of them an example belongs to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.spectra import Spectrum
from maecho.statistics.gaussians import NO_CLASS, Covariance, Moments, nearer_to_diagonal

if TYPE_CHECKING:
    from jaxtyping import Float

EXACT_WIDTH = 1024
"""Inputs up to this length have their full scatter matrix summed."""
EXACT_ON_GPU = 4096
"""The same where inputs are on a GPU, to which large products are nothing and many small eigenproblems are much."""
SKETCH = 512
"""Directions kept of longer ones."""

CLUSTERED = 2000
"""Examples of a class that k-means looks at; the others go to the nearest centre."""
ROUNDS = 20
"""Of k-means."""


class Scatter:
    """Count, mean and Σ (x − mean)(x − mean)ᵀ of one Gaussian, a batch at a time, in float64 where the inputs are."""

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None):
        d = math.prod(shape)
        self.shape, self.count = shape, 0
        self.mean = torch.zeros(d, dtype=torch.float64, device=device)
        self._exact = d <= (EXACT_WIDTH if self.mean.device.type == "cpu" else EXACT_ON_GPU)
        self._scatter = torch.zeros((d, d) if self._exact else (0, d), dtype=torch.float64, device=device)
        self._squares = torch.zeros(2, d, dtype=torch.float64, device=device)  # of entries and of cosines

    def add(self, x: Float[Tensor, "n d"]) -> None:
        n = len(x)
        x = x.to(self.mean)
        batch_mean = x.mean(0)
        gap = batch_mean - self.mean
        total = self.count + n
        self._add_rows(torch.cat([x - batch_mean, gap.unsqueeze(0) * (self.count * n / total) ** 0.5]))
        self.mean = self.mean + gap * (n / total)
        self.count = total

    def add_scatter(self, other: Scatter) -> None:
        """The spread of another around its own mean; neither mean matters."""
        if self._exact:
            self._scatter += other._scatter
        else:
            self._stack(other._scatter)
            self._squares += other._squares
        self.count += other.count

    def _add_rows(self, rows: Tensor) -> None:
        if self._exact:
            self._scatter += rows.T @ rows
            return
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
        assert spectrum.basis is not None
        self._scatter = spectrum.basis[0].T @ self._scatter

    def covariance(self) -> Spectrum:
        if self._exact:
            return Spectrum.of_dense(self._scatter.unsqueeze(0) / self.count)
        self._fold()
        weights = self._scatter.new_full((1, len(self._scatter)), 1 / self.count)
        return Spectrum.of_factor(self._scatter.T.unsqueeze(0), weights)

    def folded_away(self) -> Float[Tensor, "2 d"] | None:
        """Variances, of entries and of cosines, that the stack of rows has lost; None where nothing can be."""
        if self._exact:
            return None
        self._fold()  # as for the covariance
        rows = self._scatter
        held = [rows.square().sum(0), torch.zeros_like(self.mean)]
        if len(self.shape) > 1:
            held[1] = cosines.forth(rows, self.shape).square().sum(0)
        lost = self._squares - torch.stack(held)
        return lost.where(lost > 1e-9 * self._squares, 0.0) / self.count  # what is less is round-off


class _Parts:
    """The examples of one class among several Gaussians."""

    def __init__(self, parts: int, shape: tuple[int, ...], device: torch.device):
        self.scatters = [Scatter(shape, device) for _ in range(parts)]
        self._waiting: list[Tensor] = []
        self._centres: Tensor | None = None

    def add(self, x: Float[Tensor, "n d"]) -> None:
        if len(self.scatters) == 1:
            self.scatters[0].add(x)
        elif self._centres is None:
            self._waiting.append(x)
            if sum(map(len, self._waiting)) >= CLUSTERED:
                self.settle()
        else:
            nearest = torch.cdist(x.double(), self._centres).argmin(1)
            for k in nearest.unique().tolist():
                self.scatters[k].add(x[nearest == k])

    def settle(self) -> None:
        """Place what still waits."""
        if self._waiting:
            x, self._waiting = torch.cat(self._waiting), []
            self._centres = centres(x.double(), len(self.scatters))
            self.add(x)


def centres(x: Float[Tensor, "n d"], k: int) -> Float[Tensor, "m d"]:
    """k-means by Lloyd's rounds from k-means++ starts, always the same for the same x; fewer than k if x has fewer
    different rows."""
    rng = torch.Generator().manual_seed(0)
    chosen = x[:1]
    while len(chosen) < k:
        gaps = torch.cdist(x, chosen).amin(1) ** 2
        if float(gaps.max()) == 0:
            break
        chosen = torch.cat([chosen, x[torch.multinomial(gaps.cpu(), 1, generator=rng).to(x.device)]])
    for _ in range(ROUNDS):
        nearest = torch.cdist(x, chosen).argmin(1)
        members = torch.nn.functional.one_hot(nearest, len(chosen)).to(x)
        sizes = members.sum(0).unsqueeze(1)
        chosen = torch.where(sizes > 0, members.T @ x / sizes.clamp(min=1), chosen)
    return chosen


class ClassScatter:
    """A Scatter, or several, for every class that turns up."""

    def __init__(self, gaussians: int = 1, covariance: Covariance = "class") -> None:
        self.shape: tuple[int, ...] | None = None
        self._gaussians, self._covariance = gaussians, covariance
        self._classes: dict[int, _Parts] = {}

    def add(self, x: Tensor, labels: Tensor | None) -> None:
        self.shape = tuple(x.shape[1:])
        x = x.reshape(len(x), -1)
        x = x.cpu() if x.device.type == "mps" else x  # which has no float64
        if labels is None:
            labels = torch.full((len(x),), NO_CLASS)
        labels = labels.to(x.device)
        for label in labels.unique().tolist():
            if label not in self._classes:
                self._classes[label] = _Parts(self._gaussians, self.shape, x.device)
            self._classes[label].add(x[labels == label])

    def moments(self) -> Moments:
        assert self.shape is not None
        found: list[tuple[int, Scatter]] = []
        for label in sorted(self._classes):
            self._classes[label].settle()
            found += [(label, scatter) for scatter in self._classes[label].scatters if scatter.count]
        scatters = [scatter for _, scatter in found]
        spread = self._spread(scatters)
        residual, in_cosines = _folded_away(spread)
        return Moments(
            classes=torch.tensor([label for label, _ in found]),
            counts=torch.tensor([scatter.count for scatter in scatters]),
            means=torch.stack([scatter.mean for scatter in scatters]).cpu(),
            covariances=tuple(scatter.covariance().to(device=torch.device("cpu")) for scatter in spread),
            shape=self.shape,
            residual=residual,
            in_cosines=in_cosines,
        )

    def _spread(self, scatters: list[Scatter]) -> list[Scatter]:
        """Those that covariances are of."""
        if self._covariance == "class":
            return scatters
        pooled = Scatter(scatters[0].shape, scatters[0].mean.device)
        for scatter in scatters:
            pooled.add_scatter(scatter)
        return [pooled]


def _folded_away(scatters: list[Scatter]) -> tuple[Tensor | None, bool]:
    """The residual of moments whose directions are not all there; None if nothing is lost."""
    found = [scatter.folded_away() for scatter in scatters]  # of one width: all exact, or none
    lost = [one for one in found if one is not None]
    if not any(bool(one.any()) for one in lost):
        return None, False
    entries, along_cosines = torch.stack(lost, 1).cpu()
    return nearer_to_diagonal(entries, along_cosines)
