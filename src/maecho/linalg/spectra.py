"""Positive semidefinite matrices in factored form, A = U diag(s) Uᵀ + t (I − U Uᵀ).

Gram matrices and projectors are kept, cut down, sent and multiplied as (U, s, t). Of directions that were cut off only
the mean eigenvalue t is known. The Gram matrix of a layer with a bias is D⁻¹ A D⁻¹, see units.py. Every tensor has a
leading axis of groups, so that one formula serves all layers. Its length is 1 for all but grouped convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.linalg.finite import is_finite
from maecho.linalg.symmetric import TOLERANCE, Dense, Diagonal, eigenvalue_complaint
from maecho.linalg.units import of_both_sides, times_last, unit_of_gram

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


AT_ONCE = 2**22
"""How many numbers of a basis are looked at together. Checking a basis takes memory for so many in float64."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A = U diag(s) Uᵀ + t (I − U Uᵀ) for each group, with s descending. With a unit it stands for D⁻¹ A D⁻¹."""

    values: Float[Tensor, "g r"]
    basis: Float[Tensor, "g d r"]
    rest: Float[Tensor, " g"] | None = None
    """t, the mean eigenvalue along all other directions. None: 0."""
    unit: Float[Tensor, " g"] | None = None
    """c: the last input is the constant that a bias reads, and A is measured in the unit in which it is c, so
    D = diag(1, …, 1, c). None: all inputs have the same unit, and D = I."""

    @classmethod
    def of_dense(cls, A: Float[Tensor, "g d d"], rank: int | None = None) -> Spectrum:
        """Eigenvalues and vectors of a symmetric PSD matrix, in float64: float32 fails on images with constant pixels.

        Raises ValueError if A is not finite, symmetric and PSD. The message completes "the matrix must be …".
        """
        A = A.double()
        if not is_finite(A):
            raise ValueError("finite, got NaN or infinity")
        scale = float(A.abs().max()) if A.numel() else 0.0
        skew = float((A - A.mT).abs().max()) if A.numel() else 0.0
        if skew > TOLERANCE * scale:
            raise ValueError(f"symmetric, got entries that differ by {skew:.3g} from their mirror image")
        s, U = torch.linalg.eigh((A + A.mT) / 2)
        s, U = s.flip(-1), U.flip(-1)
        if s.numel() and float(s.min()) < -TOLERANCE * scale:
            raise ValueError(f"positive semidefinite, got the eigenvalue {float(s.min()):.3g}")
        s = s.clamp(min=0)
        noise = A.shape[-1] * torch.finfo(torch.float64).eps * scale
        full = int((s > noise).sum(-1).max()) if s.numel() else 0
        return cls(s, U).cut(full if rank is None else min(rank, full))

    @classmethod
    def of_gram(cls, G: Float[Tensor, "g d d"], bias: bool) -> Spectrum:
        """A Gram matrix of inputs x, or of (x, 1) for a layer with a bias. Then its unit is the one in which the
        constant is as large as the data.

        Raises ValueError as `of_dense` does.
        """
        if not (bias and is_finite(G)):
            return cls.of_dense(G)
        unit = unit_of_gram(G.double())
        return replace(cls.of_dense(of_both_sides(G.double(), unit)), unit=unit)

    @classmethod
    def of_factor(cls, K: Float[Tensor, "g d t"], w: Float[Tensor, "g t"]) -> Spectrum:
        """The spectrum of K diag(w) Kᵀ with w ≥ 0. If K has few columns, a small matrix gives the eigenvalues."""
        if K.shape[-1] >= K.shape[-2]:
            return cls.of_dense((K * w.unsqueeze(-2)) @ K.mT)
        Q, R = torch.linalg.qr(K.double())
        small = cls.of_dense((R * w.unsqueeze(-2)) @ R.mT)
        return cls(small.values, Q @ small.basis)

    @classmethod
    def zero(cls, groups: int, d: int) -> Spectrum:
        """The zero matrix, of rank 0: nothing is known about the inputs."""
        return cls(torch.zeros(groups, 0, dtype=torch.float64), torch.zeros(groups, d, 0))

    @property
    def rank(self) -> int:
        return self.values.shape[-1]

    @property
    def width(self) -> int:
        """d, the number of inputs."""
        return self.basis.shape[-2]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.basis, self.rest, self.sent_unit) if t is not None)

    @property
    def sent_unit(self) -> Float[Tensor, " g"] | None:
        """The unit. None if it is 1, which need not be said."""
        return None if self.unit is None or bool((self.unit == 1).all()) else self.unit

    @property
    def bytes_of_direction(self) -> int:
        """The size of one eigenvalue and eigenvector of every group."""
        return len(self.values) * (self.values.itemsize + self.width * self.basis.itemsize)

    @property
    def known(self) -> bool:
        return bool(self.values.any()) or (self.rest is not None and bool(self.rest.any()))

    @property
    def trace(self) -> Float[Tensor, " g"]:
        """The trace of A."""
        held = self.values.double().sum(-1)
        return held if self.rest is None else held + (self.width - self.rank) * self.rest.double()

    @cached_property
    def energy(self) -> Float[Tensor, " r"]:
        """The share of the held eigenvalues' sum that the first 1, 2, … r directions have, summed over groups."""
        total = self.values.double().sum(0).cumsum(0)
        return total / total[-1].clamp(min=torch.finfo(torch.float64).tiny) if self.rank else total

    def rank_for(self, share: float) -> int:
        """The fewest directions that have this share of the held eigenvalues' sum."""
        if not self.rank or float(self.values.sum()) == 0:
            return 0
        # A share of 1 keeps everything. Without the tolerance, round-off in the running sum could ask for one more.
        return self.rank if share >= 1 else int((self.energy < share - 1e-15).sum()) + 1

    def cut(self, rank: int, keep_rest: bool = False) -> Spectrum:
        """Keep only the largest `rank` eigenvalues (the paper's SVD section).

        With `keep_rest` the trace stays as it is: `rest` becomes the mean of all eigenvalues that are not kept.
        """
        if rank >= self.rank and (keep_rest or self.rest is None):
            return self
        values = self.values[:, :rank].contiguous()
        rest = (self.trace - values.double().sum(-1)).clamp(min=0) / max(1, self.width - rank) if keep_rest else None
        return Spectrum(values, self.basis[..., :rank].contiguous(), rest, self.unit)

    def held(self) -> Spectrum:
        """U diag(s) Uᵀ alone, without the rest."""
        return self if self.rest is None else Spectrum(self.values, self.basis, None, self.unit)

    def completed(self) -> Spectrum:
        """The same matrix without a rest: every direction is held. That takes as much memory as a dense matrix."""
        if self.rest is None:
            return self
        Q, _ = torch.linalg.qr(self.basis.double(), mode="complete")
        others = Q[..., self.rank :].to(self.basis)
        values = torch.cat([self.values, self.rest.to(self.values).unsqueeze(-1).expand(-1, others.shape[-1])], -1)
        return Spectrum(values, torch.cat([self.basis, others], -1), None, self.unit)

    def map(self, function: Callable[[Tensor], Tensor]) -> Spectrum:
        """The same directions with other eigenvalues: U diag(f(s)) Uᵀ + f(t) (I − U Uᵀ). f(0) must be 0, since without
        a rest the directions of eigenvalue 0 are not held."""
        rest = None if self.rest is None else function(self.rest)
        return Spectrum(function(self.values), self.basis, rest, self.unit)

    def scaled(self, factor: float) -> Spectrum:
        """Every eigenvalue times a factor, at least 0."""
        return self.map(lambda s: factor * s)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Spectrum:
        """The basis in another dtype; basis and eigenvalues on another device.

        Eigenvalues stay float64, since 1 − s must not round to 0. The basis is contiguous, as it is after reading from
        a file, so that products round in the same way.
        """
        basis = self.basis.to(dtype=dtype, device=device).contiguous()
        rest, unit = (None if t is None else t.to(device=device) for t in (self.rest, self.unit))
        return replace(self, values=self.values.to(device=device), basis=basis, rest=rest, unit=unit)

    def permuted(self, order: Tensor) -> Spectrum:
        """The groups in another order."""
        rest, unit = (None if t is None else t[order] for t in (self.rest, self.unit))
        return Spectrum(self.values[order], self.basis[order], rest, unit)

    def dense(self) -> Float[Tensor, "g d d"]:
        s, U = self._above_rest(self.basis.dtype), self.basis
        A = (U * s) @ U.mT
        if self.rest is not None:
            A.diagonal(dim1=-2, dim2=-1).add_(self.rest.to(A).unsqueeze(-1))
        return A if self.unit is None else of_both_sides(A, 1 / self.unit)

    def total(self) -> Dense:
        """The first term of a sum over clients: in float64, in new memory."""
        exact = replace(self, values=self.values.double(), basis=self.basis.double())
        return Dense(exact.dense(), bias=self.unit is not None)

    def after(self, M: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        """M A, without building A. With a unit: M D⁻¹ A D⁻¹."""
        if self.unit is not None:
            return times_last(replace(self, unit=None).after(times_last(M, 1 / self.unit)), 1 / self.unit)
        s, U = self._above_rest(M.dtype), self.basis.to(M.dtype)
        found = ((M @ U) * s) @ U.mT
        return found if self.rest is None else found + self.rest.to(M.dtype)[:, None, None] * M

    def onto(self, B: Float[Tensor, "g o d"]) -> Float[Tensor, "g o d"]:
        """B U Uᵀ, the rows of B along the held directions. With a unit: B D U Uᵀ D⁻¹."""
        ones = self.held().map(torch.ones_like)
        return ones.after(B if self.unit is None else times_last(B, self.unit**2))

    def _above_rest(self, dtype: torch.dtype) -> Float[Tensor, "g 1 r"]:
        """s − t, since A = U diag(s − t) Uᵀ + t I."""
        s = self.values if self.rest is None else self.values - self.rest.to(self.values).unsqueeze(-1)
        return s.to(dtype).unsqueeze(-2)

    def malformed(self) -> str | None:
        """What is wrong with the shapes of its parts, in words that complete "… must be"; None if nothing is."""
        values = tuple(self.values.shape)
        if len(values) != 2:
            return f"given by eigenvalues [groups, rank], got shape {values}"
        if self.basis.dim() != 3 or self.basis.shape[::2] != values:
            got = tuple(self.basis.shape)
            return f"given by eigenvectors [groups, inputs, rank] to its eigenvalues {values}, got {got}"
        if self.rank > self.width:
            return f"given by at most {self.width} eigenvectors, one for each input, got {self.rank}"
        if self.rest is not None and self.rest.shape != values[:1]:
            return f"given with one rest for each of its {values[0]} group(s), got shape {tuple(self.rest.shape)}"
        if self.unit is not None and self.unit.shape != values[:1]:
            return f"given with one unit for each of its {values[0]} group(s), got shape {tuple(self.unit.shape)}"
        return None

    def complaint(self, largest: float = float("inf")) -> str | None:
        """What is wrong with its values, in words that complete "… must be"; None if nothing is.

        A few fixed vectors test whether the basis is orthonormal. That costs no more than one product. It looks at a
        few rows of the basis at a time.
        """
        if not is_finite(self.basis) or not (self.unit is None or is_finite(self.unit)):
            return "finite, got NaN or infinity"
        if self.unit is not None and not bool((self.unit > 0).all()):
            return f"given with units above 0, got {float(self.unit.min()):.3g}"
        wrong = eigenvalue_complaint(self.values, largest)
        if self.rest is not None:
            wrong = wrong or eigenvalue_complaint(self.rest, largest)
        if wrong or self.rank == 0:
            return wrong
        # Float32 is much finer than the tolerance. A product that it cannot hold is not orthonormal either.
        dtype = torch.promote_types(self.basis.dtype, torch.float32)
        probe = torch.randn(self.rank, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        probe = probe.to(self.basis.device, dtype)
        # The direction of an eigenvalue 0 does not matter, unless it is kept apart from a rest.
        used = self.values > 0 if self.rest is None else (self.values > 0) | (self.rest > 0).unsqueeze(-1)
        groups = max(1, AT_ONCE // (self.width * self.rank))
        pairs = zip(used.split(groups), self.basis.split(groups), strict=True)
        errors = [_off_orthonormal(some, basis, probe) for some, basis in pairs]
        error = max(errors) if all(math.isfinite(one) for one in errors) else math.inf
        if not error <= TOLERANCE * 10:
            return f"given by orthonormal eigenvectors, got UᵀU off by {error:.3g}"
        return None


def _off_orthonormal(used: Bool[Tensor, "g r"], basis: Float[Tensor, "g d r"], probe: Float[Tensor, "r n"]) -> float:
    """The largest entry of (UᵀU − I) probe for the directions that are used."""
    used = used.unsqueeze(-1)
    wanted = probe * used
    found = torch.zeros_like(wanted)
    for rows in basis.split(max(1, AT_ONCE // (len(basis) * len(probe))), dim=1):
        U = rows.to(probe)
        found += U.mT @ (U @ wanted)
    return float((found - wanted).abs().where(used, found.new_zeros(1)).max())


def projector(gram: Spectrum | Diagonal, z: float) -> Spectrum | Diagonal:
    """P = G (G + zI)⁻¹, the soft projector on the span of the inputs whose Gram matrix this is."""
    return gram.map(lambda s: s / (s + z))
