"""Solves Σ_i B_i W A_i + ρ W = Σ_i B_i W_i A_i + ρ W̄ for W, with symmetric PSD A_i and B_i in factored form.

The method is conjugate gradients (Hestenes and Stiefel, 1952). It starts at W̄, works on all groups of a layer at once,
and computes in float64. A product with the left-hand side needs only the factors of each client. The preconditioner is
the Kronecker product that has the same two partial traces as the sum,

    Σ_i A_i ⊗ B_i ≈ Ā ⊗ B̄ / τ,    Ā = Σ_i tr(B_i) A_i,  B̄ = Σ_i tr(A_i) B_i,  τ = Σ_i tr(A_i) tr(B_i).

Inverting it together with ρ takes two eigenvalue problems of the size of the layer. For one client the approximation is
exact, so one step is enough. The same holds if all A_i, or all B_i, are multiples of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Dense, Diagonal, Total, eigenvalues

if TYPE_CHECKING:
    from jaxtyping import Float

ROUND_OFF = 1e-12
"""A residual below this share of the right-hand side is noise: the average already solves the equation."""
PATIENCE = 8
"""On a GPU the residual is read only after this many steps, because reading it waits for all work in the queue. Steps
after the tolerance is reached change nothing."""


@dataclass(frozen=True)
class Solution:
    """W, and how it was reached."""

    matrix: Float[Tensor, "g o d"]
    residual: float
    """The residual of the worst group, relative to the one at the start, in the norm of the preconditioner."""
    iterations: int
    known: bool
    """Whether any client has information about this layer. If not, the matrix is the average."""


class Factor:
    """A + shift · I, multiplied in the cheaper way: by its thin factors, or as a dense matrix if A has a high rank."""

    def __init__(self, A: Spectrum | Diagonal, shift: float | Float[Tensor, "g 1 1"]):
        # One memory layout gives one rounding: an upload from a file and one from memory agree to the last bit.
        self._A = A.to()
        self._shift = shift
        self.trace: Float[Tensor, "g 1 1"] = A.trace[:, None, None] + shift * A.width
        self._total: Total | None = None

    def total(self) -> Total:
        """The same matrix in the form of sums over clients."""
        return self._A.total().plus_identity(self._shift)

    def prepare(self) -> Factor:
        """Prepare for many products: convert to float64, which takes more memory."""
        if isinstance(self._A, Diagonal) or 2 * self._A.rank > self._A.width:
            self._total = self.total()
        else:
            self._A = self._A.to(dtype=torch.float64)
        return self

    def after(self, M: Tensor) -> Tensor:
        return self._A.after(M) + self._shift * M if self._total is None else self._total.after(M)


class Sylvester:
    """Collects the equation of one layer, client by client, and solves it."""

    def __init__(self) -> None:
        self._factors: list[tuple[Factor, Factor]] = []
        self._right: Tensor | None = None

    def add(
        self,
        W: Float[Tensor, "g o d"],
        A: Spectrum | Diagonal,
        B: Spectrum,
        a: float | Tensor = 0.0,
        b: float | Tensor = 0.0,
    ) -> None:
        """Add a client; a and b are added to the diagonals of A and B. A client with A = 0 or B = 0 has no information
        and is left out."""
        W = W.double().contiguous()
        if self._right is None:
            self._right = torch.zeros_like(W)
        if A.known and B.known:
            factors = Factor(A, a), Factor(B, b)
            self._right += _both_sides(factors[1], W, factors[0])
            self._factors.append(factors)

    def solve(self, start: Float[Tensor, "g o d"], ridge: float, tolerance: float, iterations: int) -> Solution:
        """Iterate from the start W̄, with ρ = ridge · mean eigenvalue of Σ A_i ⊗ B_i."""
        assert self._right is not None
        start = start.double()
        if not self._factors:
            return Solution(start, 0.0, 0, False)
        factors = [(A.prepare(), B.prepare()) for A, B in self._factors]
        precondition = Preconditioner(factors, ridge, start.shape[-2], start.shape[-1])

        def left(M: Tensor) -> Tensor:
            return sum((_both_sides(B, M, A) for A, B in factors), precondition.rho * M)

        R = self._right - left(start) + precondition.rho * start
        R = torch.where(_inner(R, R).sqrt() <= ROUND_OFF * _inner(self._right, self._right).sqrt(), 0, R)
        D, Z = torch.zeros_like(R), precondition(R)
        step, size = Z, _inner(R, Z)
        first = size.clamp(min=torch.finfo(torch.float64).tiny)
        done, patience = 0, 1 if start.device.type == "cpu" else PATIENCE
        far = (size / first).max() > tolerance**2
        while done < iterations and (done % patience or bool(far)):
            image = left(step)
            bend = _inner(step, image)
            go = torch.where(far & (bend > 0), size / bend.where(bend > 0, torch.ones_like(bend)), 0)
            D, R = D + go * step, R - go * image
            Z = precondition(R)
            old, size = size, _inner(R, Z)
            step = Z + size / old.clamp(min=torch.finfo(torch.float64).tiny) * step
            far = (size / first).max() > tolerance**2
            done += 1
        return Solution(start + D, float((size / first).max()) ** 0.5, done, True)


class Preconditioner:
    """(Ā ⊗ B̄ / τ + ρ)⁻¹. If ρ = 0, the pseudoinverse."""

    def __init__(self, factors: list[tuple[Factor, Factor]], ridge: float, out: int, d: int):
        tau = sum((A.trace * B.trace for A, B in factors), factors[0][0].trace.new_zeros(()))
        a, self._U = _eigen(reduce(_sum, (A.total().scaled(B.trace) for A, B in factors)))
        b, self._V = _eigen(reduce(_sum, (B.total().scaled(A.trace) for A, B in factors)))
        self.rho: Float[Tensor, "g 1 1"] = ridge * tau / (out * d)
        scale = b.mT * a / tau.where(tau > 0, torch.ones_like(tau)) + self.rho
        floor = scale.amax((-2, -1), keepdim=True) * max(out, d) * torch.finfo(torch.float64).eps
        self._inverse = torch.where(scale > floor, 1 / scale.where(scale > floor, torch.ones_like(scale)), 0)

    def __call__(self, M: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        assert self._V is not None
        inner = self._V.mT @ M
        if self._U is None:
            return self._V @ (inner * self._inverse)
        return self._V @ ((inner @ self._U) * self._inverse) @ self._U.mT


def _both_sides(B: Factor, M: Tensor, A: Factor) -> Tensor:
    """B M A."""
    return B.after(A.after(M).mT).mT


def _sum(one: Total, other: Total) -> Total:
    return one.plus(other)


def _eigen(A: Total) -> tuple[Float[Tensor, "g 1 d"], Tensor | None]:
    """The eigenvalues as one row, and the eigenvectors; None in their place if A is diagonal."""
    if isinstance(A, Dense):
        s, U = eigenvalues(A.matrix)
        return s.unsqueeze(-2), U
    assert isinstance(A, Diagonal)
    return A.values.unsqueeze(-2), None


def _inner(M: Tensor, other: Tensor) -> Float[Tensor, "g 1 1"]:
    return (M * other).sum((-2, -1), keepdim=True)
