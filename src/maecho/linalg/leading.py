"""The leading eigenvalues and eigenvectors of a large matrix, where not all of them are wanted.

Subspace iteration from random directions: multiply by A, make the columns orthonormal, again. After a few rounds the
columns span nearly what the leading eigenvectors span, and a small eigenproblem within them finds these. Directions
with eigenvalues well above the others are exact to rounding. The last ones are mixed with others of nearly the same
eigenvalue: what they leave of A is at most 2 % larger, in its norm, than what the best matrix of this rank leaves
(tests/linalg/test_leading.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.linalg.finite import is_finite
from maecho.linalg.spectra import Spectrum
from maecho.linalg.units import of_both_sides, unit_of_gram

if TYPE_CHECKING:
    from jaxtyping import Float

ROUNDS = 3
"""In float32. One in float64 follows."""
MORE = 1.25
"""How many columns are iterated, for each direction that is wanted."""
NOTHING = 1e-10
"""A smaller share of the trace is round-off."""
WORTH = 4
"""All eigenvalues are computed if a matrix is no wider than so many times the directions that are wanted, since that
costs as little."""
SMALL = 256
"""And of a matrix no wider than this."""


@dataclass(frozen=True, eq=False)
class Leading(Spectrum):
    """The leading directions of a matrix, of which the others were not computed."""

    tail: float = 0.0
    """The sum of the eigenvalues that were not computed, over all groups."""

    @property
    def energy(self) -> Float[Tensor, " r"]:
        """The share of the sum of all eigenvalues that the first 1, 2, … r directions have, summed over groups."""
        total = self.values.double().sum(0)
        return total.cumsum(0) / (total.sum() + self.tail)

    def rank_for(self, share: float) -> int:
        """The fewest directions that have this share of all eigenvalues; more than are held if these do not have it."""
        return self.width if share >= 1 else super().rank_for(share)


def leading(A: Float[Tensor, "g d d"], rank: int | None, keep_rest: bool = True) -> Spectrum:
    """The spectrum of a symmetric PSD matrix, or only its first `rank` directions if that costs less.

    With `keep_rest` the mean eigenvalue of the others is kept. Raises ValueError as `Spectrum.of_dense` does.
    """
    d = A.shape[-1]
    if rank is None or d <= SMALL or d <= WORTH * rank or not A.numel():
        return Spectrum.of_dense(A)
    A = A.double()
    scale = float(A.abs().max())
    trace = A.diagonal(dim1=-2, dim2=-1).sum(-1)
    if not 0 < scale < float("inf"):  # 0, infinite or NaN
        return Spectrum.of_dense(A)
    columns = min(d, int(MORE * rank) + 8)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(d, columns, generator=generator, dtype=torch.float64).to(A.device).expand(len(A), -1, -1)
    single = (A / scale).float()
    Y = X.float()
    for _ in range(ROUNDS):
        Y = torch.linalg.qr(single @ Y).Q
    U = torch.linalg.qr(A @ Y.double()).Q  # so that a matrix of low rank is met to the last digit
    found = Spectrum.of_dense(U.mT @ (A @ U), rank)
    found = found.cut(int((found.values > NOTHING / d * trace.unsqueeze(-1)).sum(-1).max()))
    basis = U @ found.basis
    tail = (trace - found.values.sum(-1)).clamp(min=0)
    if bool((tail <= NOTHING * trace).all()):
        return Spectrum(found.values, basis)
    rest = tail / max(1, d - found.rank) if keep_rest else None
    return Leading(found.values, basis, rest, tail=float(tail.sum()))


def leading_of_gram(G: Float[Tensor, "g d d"], bias: bool, rank: int | None) -> Spectrum:
    """The same of a Gram matrix of inputs x, or of (x, 1) for a layer with a bias. Which directions lead there is asked
    in the unit of `Spectrum.of_gram`, in which the constant is as large as the data.

    Raises ValueError as `Spectrum.of_dense` does.
    """
    if not (bias and is_finite(G)):
        return leading(G, rank)
    unit = unit_of_gram(G.double())
    return replace(leading(of_both_sides(G.double(), unit), rank), unit=unit)
