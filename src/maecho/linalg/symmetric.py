"""Symmetric matrices in two forms: `Dense` holds all entries [g, d, d], `Diagonal` only the diagonal [g, d].

Sums over clients have one of these two forms. One client sends a `Diagonal` or a `Spectrum` (spectra.py); its method
`total` gives the first term of such a sum. The leading axis g counts groups. It is 1 for all but grouped convolutions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch
from torch import Tensor

from maecho.linalg.finite import is_finite
from maecho.linalg.units import of_both_sides, times_last, unit_of_gram

if TYPE_CHECKING:
    from jaxtyping import Float

TOLERANCE = 1e-3
"""How far a matrix may be from symmetric, orthonormal or non-negative. Float32 round-off stays well below it."""


class Total(ABC):
    """A sum over clients of symmetric matrices of one form."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The width d of the matrix."""

    @property
    @abstractmethod
    def known(self) -> bool:
        """Whether any entry differs from 0."""

    @property
    @abstractmethod
    def mean_eigenvalue(self) -> Float[Tensor, "g 1 #d"]:
        """trace / d of each group. A ridge is a multiple of it. The data and the constant input of a bias have one
        each, since they are not measured in the same unit."""

    def ridge(self, share: float, rows: float) -> Float[Tensor, "g 1 #d"]:
        """ε = share · (d / rows) · trace, if this matrix is the sum of x xᵀ over `rows` rows x. With more inputs d or
        fewer rows, a larger share of the trace is added. The constant input of a bias counts by itself, with d = 1."""
        mean = self.mean_eigenvalue
        widths = torch.full_like(mean[:1], self.width)
        if mean.shape[-1] > 1:
            widths[..., :-1], widths[..., -1] = self.width - 1, 1
        return share / rows * widths**2 * mean

    @abstractmethod
    def add_(self, other: Self) -> Self:
        """Add in place."""

    @abstractmethod
    def plus(self, other: Self) -> Self:
        """The sum, in new memory."""

    @abstractmethod
    def scaled(self, factor: float | Tensor) -> Self:
        """Every entry times a factor: one number for all groups, or a tensor [g, 1, 1]."""

    @abstractmethod
    def shrunk(self, share: float) -> Self:
        """The same diagonal, with every other entry times this share."""

    @abstractmethod
    def plus_identity(self, amount: float | Tensor = 1.0) -> Self:
        """A + amount · I, with one amount for all groups, a tensor [g, 1, 1], or one for each input [g, 1, d]."""

    @abstractmethod
    def after(self, M: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        """M A."""

    @abstractmethod
    def solve(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        """B A⁻¹. A must be invertible."""

    @abstractmethod
    def divide(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        """B A⁺ with the pseudoinverse. A must be positive semidefinite."""


@dataclass(frozen=True, eq=False)
class Dense(Total):
    """All entries of a symmetric matrix, one matrix for each group."""

    matrix: Float[Tensor, "g d d"]
    bias: bool = False
    """Whether the last input is the constant 1 that a bias reads, whose unit is not that of the others."""

    @property
    def width(self) -> int:
        return self.matrix.shape[-1]

    @property
    def known(self) -> bool:
        return bool(self.matrix.any())

    @property
    def mean_eigenvalue(self) -> Float[Tensor, "g 1 #d"]:
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        if not self.bias:
            return diagonal.mean(-1, keepdim=True)
        data = diagonal[..., :-1]
        return torch.cat([data.mean(-1, keepdim=True).expand_as(data), diagonal[..., -1:]], -1)

    def add_(self, other: Dense) -> Dense:
        self.matrix.add_(other.matrix)
        return self

    def scaled(self, factor: float | Tensor) -> Dense:
        return replace(self, matrix=self.matrix * factor)

    def plus(self, other: Dense) -> Dense:
        return replace(self, matrix=self.matrix + other.matrix)

    def plus_identity(self, amount: float | Tensor = 1.0) -> Dense:
        A = self.matrix
        return replace(self, matrix=A + amount * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))

    def after(self, M: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        return M @ self.matrix

    def shrunk(self, share: float) -> Dense:
        if share == 1:
            return self
        diagonal = torch.diag_embed(self.matrix.diagonal(dim1=-2, dim2=-1))
        return replace(self, matrix=share * self.matrix + (1 - share) * diagonal)

    def solve(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        solved: Tensor = torch.linalg.solve(self.matrix, B, left=False)
        return solved

    def divide(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        """B A⁺: by Cholesky if A is clearly positive definite, by eigenvalues if not.

        With a bias it is B D (D A D)⁺ D, see units.py. So what is small beside the rest does not depend on units.
        """
        A = self.matrix
        if self.bias:
            unit = unit_of_gram(A)
            return times_last(Dense(of_both_sides(A, unit)).divide(times_last(B, unit)), unit)
        factor, info = torch.linalg.cholesky_ex(A)
        if not info.any():
            pivots = factor.diagonal(dim1=-2, dim2=-1)
            if float((pivots.amin(-1) / pivots.amax(-1)).min()) > 1e-6:
                solved: Tensor = torch.cholesky_solve(B.mT, factor).mT
                return solved
        s, U = eigenvalues(A)
        floor = s.amax(-1, keepdim=True) * A.shape[-1] * torch.finfo(A.dtype).eps
        inverse = torch.where(s > floor, 1 / s.where(s > floor, torch.ones_like(s)), torch.zeros_like(s))
        return ((B @ U) * inverse.unsqueeze(-2)) @ U.mT


@dataclass(frozen=True, eq=False)
class Diagonal(Total):
    """A matrix that is zero off its diagonal, such as the Gram matrix of one-hot rows."""

    values: Float[Tensor, "g d"]

    @classmethod
    def zero(cls, groups: int, d: int) -> Diagonal:
        return cls(torch.zeros(groups, d, dtype=torch.float64))

    @property
    def width(self) -> int:
        return self.values.shape[-1]

    @property
    def rank(self) -> int:
        """Always d: a diagonal is never cut, since it is already small."""
        return self.values.shape[-1]

    @property
    def bytes(self) -> int:
        return self.values.nbytes

    @property
    def known(self) -> bool:
        return bool(self.values.any())

    @property
    def trace(self) -> Float[Tensor, " g"]:
        return self.values.double().sum(-1)

    @property
    def mean_eigenvalue(self) -> Float[Tensor, "g 1 1"]:
        return self.values.mean(-1)[:, None, None]

    def add_(self, other: Diagonal) -> Diagonal:
        self.values.add_(other.values)
        return self

    def scaled(self, factor: float | Tensor) -> Diagonal:
        return Diagonal(self.values * _of_groups(factor))

    def plus(self, other: Diagonal) -> Diagonal:
        return Diagonal(self.values + other.values)

    def plus_identity(self, amount: float | Tensor = 1.0) -> Diagonal:
        return Diagonal(self.values + _of_groups(amount))

    def after(self, M: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        return M * self.values.to(M.dtype).unsqueeze(-2)

    def shrunk(self, share: float) -> Diagonal:
        """The same matrix, since there are no other entries."""
        return self

    def solve(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        return B / self.values.unsqueeze(-2)

    def divide(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        a = self.values.unsqueeze(-2)
        return torch.where(a > 0, B / a.where(a > 0, torch.ones_like(a)), torch.zeros_like(B))

    def map(self, function: Callable[[Tensor], Tensor]) -> Diagonal:
        """The function of every entry of the diagonal."""
        return Diagonal(function(self.values))

    def total(self) -> Diagonal:
        """The first term of a sum over clients: in float64, in new memory."""
        return Diagonal(self.values.to(torch.float64, copy=True))

    def dense(self) -> Float[Tensor, "g d d"]:
        return torch.diag_embed(self.values)

    def onto(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        """The same matrix, since every direction is held."""
        return B

    def held(self) -> Diagonal:
        """The same matrix, since nothing of it can be cut."""
        return self

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Diagonal:
        """On another device. The values stay float64; `dtype` is ignored."""
        return Diagonal(self.values.to(device=device))

    def permuted(self, order: Tensor) -> Diagonal:
        """The groups in another order."""
        return Diagonal(self.values[order])

    def malformed(self) -> str | None:
        """What is wrong with the shape, in words that complete "… must be"; None if nothing is."""
        if self.values.dim() != 2:
            return f"given by a diagonal [groups, inputs], got shape {tuple(self.values.shape)}"
        return None

    def complaint(self, largest: float = float("inf")) -> str | None:
        """What is wrong with the values, in words that complete "… must be"; None if nothing is."""
        return eigenvalue_complaint(self.values, largest)


def _of_groups(amount: float | Tensor) -> float | Tensor:
    """Reshape [g, 1, 1] to [g, 1], which broadcasts with a diagonal."""
    return amount.squeeze(-2) if isinstance(amount, Tensor) and amount.dim() else amount


def eigenvalues(A: Float[Tensor, "g d d"]) -> tuple[Float[Tensor, "g d"], Float[Tensor, "g d d"]]:
    """Eigenvalues, ascending, and eigenvectors of the positive semidefinite matrix that is nearest to A."""
    s: Tensor
    U: Tensor
    s, U = torch.linalg.eigh((A + A.mT) / 2)
    return s.clamp(min=0), U


def eigenvalue_complaint(values: Tensor, largest: float) -> str | None:
    """What is wrong with eigenvalues, in words that complete "… must be"; None if nothing is."""
    if not is_finite(values):
        return "finite, got NaN or infinity"
    if not values.numel():
        return None
    low, high = float(values.min()), float(values.max())
    if low < 0:
        return f"positive semidefinite, got the eigenvalue {low:.3g}"
    if high > largest * (1 + TOLERANCE):
        return f"of eigenvalues in [0, {largest:g}], got {high:.3g}"
    return None


class Addable(Protocol):
    """Anything that can be summed in place: tensors, and the matrices of this module."""

    def add_(self, other: Self, /) -> Self: ...


A = TypeVar("A", bound=Addable)
K = TypeVar("K")


def add_into(totals: dict[K, A], key: K, part: A) -> None:
    """totals[key] += part, in place. The first part becomes the total itself, so nobody else may use its memory."""
    totals[key] = totals[key].add_(part) if key in totals else part
