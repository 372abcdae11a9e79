"""One layer of MA-Echo, iterated: the global W and every client's V_i.

All three forms are one pair of steps with other coefficients,

    W   ← W − Σ_i ω_i (W − V_i) P_i                          pull: back to where client i has data
    V_i ← (1 − κ) V_i + κ W − ρ (W − V_i) P_i                follow: towards W, except where client i has data

With P_i = U_i diag(s_i) U_iᵀ everything that differs between clients lives in the columns of U = [U_1 … U_N]:

    W = W⁰ − H Uᵀ,    V_i = c W_i + S + L_i U_iᵀ,    S = σ W⁰ − F Uᵀ

with scalars c, σ and matrices H, F, L that have as many columns as U. An iteration needs (W − V_i) U_i. UᵀU is enough
to compute it, so an iteration touches no dense matrix of a client. If each client's step is normalised (Norm), the V_i
no longer have this form, and every V_i is kept by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal

if TYPE_CHECKING:
    from jaxtyping import Float, Int

AT_ONCE = 2**22
"""How many numbers of all clients' gradients are in memory at a time."""

Alpha = Callable[[Tensor], Tensor]
"""Gram matrix of the clients' gradients [N, N] -> weights of the clients."""


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one form."""

    pull: float
    """ω_i = pull · α_i"""
    follow: float
    """κ"""
    hold: float
    """ρ"""
    anchored: bool = False
    """Every step computes V_i from W_i, as Eq. (11) does, and not from the last V_i."""
    normalised: bool = False
    """Norm: every row of a client's step has length κ."""
    alpha: Alpha | None = None
    """Computes the α_i. None: every α_i is 1/N."""


class Iterates(Protocol):
    """The operations of a layer's iterates, however they are stored."""

    def step(self) -> None: ...
    def merged(self) -> Float[Tensor, "g o d"]:
        """W."""
        ...

    def client(self, index: int) -> Float[Tensor, "g o d"]:
        """V_i."""
        ...

    def mean(self) -> Float[Tensor, "g o d"]:
        """The mean of the V_i."""
        ...


class Columns:
    """U = [U_1 … U_N] of one layer, and the products with it."""

    def __init__(self, spectra: Sequence[Spectrum | Diagonal], dtype: torch.dtype):
        self.ranks = [spectrum.rank for spectrum in spectra]
        device = spectra[0].values.device
        self.s = torch.cat([spectrum.values.to(dtype) for spectrum in spectra], -1).unsqueeze(-2)
        owner = torch.arange(len(spectra)).repeat_interleave(torch.tensor(self.ranks))
        self.owner: Int[Tensor, " columns"] = owner.to(device)
        bases = [spectrum.basis.to(dtype) for spectrum in spectra if isinstance(spectrum, Spectrum)]
        self._U = torch.cat(bases, -1) if bases else None  # None: every P is diagonal, U = [I … I]
        # M ↦ M Uᵀ U is one product with UᵀU, or two thin ones, whichever is less work.
        self._UU: Tensor | None = None
        self._precise_UU: Tensor | None = None
        if self._U is not None and self._U.shape[-1] < 2 * self._U.shape[-2]:
            self._UU = self._U.mT @ self._U

    def into(self, M: Float[Tensor, "g o d"]) -> Float[Tensor, "g o columns"]:
        """M U."""
        return M.repeat(1, 1, len(self.ranks)) if self._U is None else M @ self._U

    def back(self, E: Float[Tensor, "g o columns"]) -> Float[Tensor, "g o d"]:
        """E Uᵀ."""
        if self._U is None:
            return E.reshape(*E.shape[:-1], len(self.ranks), -1).sum(-2)
        return E @ self._U.mT

    def through(self, E: Float[Tensor, "g o columns"]) -> Float[Tensor, "g o columns"]:
        """E Uᵀ U."""
        return self.into(self.back(E)) if self._UU is None else E @ self._UU

    def each(self, local: Sequence[Float[Tensor, "g o d"]]) -> Float[Tensor, "g o columns"]:
        """[W_1 U_1 … W_N U_N]."""
        if self._U is None:
            return torch.cat(list(local), -1)
        pairs = zip(local, self._U.split(self.ranks, -1), strict=True)
        return torch.cat([W @ U for W, U in pairs], -1)

    def one(self, E: Float[Tensor, "g o columns"], index: int) -> Float[Tensor, "g o d"]:
        """E_i U_iᵀ."""
        own: Tensor = E.split(self.ranks, -1)[index]
        if self._U is None:
            return own
        U: Tensor = self._U.split(self.ranks, -1)[index]
        return own @ U.mT

    def gram(self, D: Float[Tensor, "g o columns"]) -> Float[Tensor, "clients clients"]:
        """Inner products of the clients' gradients 2 D_i U_iᵀ, in float64: a Gram matrix must look like one."""
        D = D.double()
        if self._U is None:
            return 4 * inner_products(D.reshape(*D.shape[:-1], len(self.ranks), -1).transpose(-2, -3))
        if self._thin_is_cheaper():
            if self._precise_UU is None:
                self._precise_UU = self._U.double().mT @ self._U.double()
            products = ((D.mT @ D) * self._precise_UU).sum(0)
            n = len(self.ranks)
            rows = products.new_zeros(n, products.shape[1]).index_add_(0, self.owner, products)
            return 4 * products.new_zeros(n, n).index_add_(1, self.owner, rows)
        found = D.new_zeros(len(self.ranks), len(self.ranks))
        # A few rows of all gradients at a time.
        for rows in D.split(max(1, AT_ONCE // (len(D) * len(self.ranks) * self._U.shape[-2])), dim=-2):
            pairs = zip(rows.split(self.ranks, -1), self._U.split(self.ranks, -1), strict=True)
            found += inner_products(torch.stack([own @ U.double().mT for own, U in pairs], 1))
        return 4 * found

    def _thin_is_cheaper(self) -> bool:
        """Whether (Σ r_i)² products of columns take less work than the gradients themselves and their N² products."""
        columns, n = sum(self.ranks), len(self.ranks)
        assert self._U is not None
        # Products of columns are also looked at one by one, which takes as long as adding them up.
        return 2 * columns**2 <= self._U.shape[-2] * (columns + n**2)


def inner_products(parts: Float[Tensor, "g clients o d"]) -> Float[Tensor, "clients clients"]:
    """Σ over all entries of the products of each pair of clients."""
    flat = parts.flatten(-2)
    return (flat @ flat.mT).sum(0)


class SharedIterates:
    """W and all V_i, held as coefficients of the columns of U.

    Each step computes the gap E_i = (W − V_i) U_i from the last gap, so an iteration needs only one product with UᵀU.
    The pull lowers the gap of every client by Σ_j ω_j E_j diag(s_j) U_jᵀ U_i. Following W then multiplies each of its
    columns by (1 − κ) + ρ s.
    """

    def __init__(
        self,
        start: Float[Tensor, "g o d"],
        local: Sequence[Tensor],
        spectra: Sequence[Spectrum | Diagonal],
        coefficients: Coefficients,
    ):
        self._coefficients, self._local = coefficients, local
        self._U = Columns(spectra, start.dtype)
        self._W0, self._mean = start, sum(local[1:], local[0]) / len(local)
        # Steps change these tensors in place, so nothing else may share their memory.
        self._gap = self._U.into(start) - self._U.each(local)
        self._H, self._F, self._L = (torch.zeros_like(self._gap) for _ in range(3))
        self._c, self._sigma = 1.0, 0.0
        self._apart = self._gap.clone() if coefficients.anchored else None  # (W − W_i) U_i

    def step(self) -> None:
        coefficients, U = self._coefficients, self._U
        D = self._gap * U.s  # (W − V_i) P_i = D_i U_iᵀ
        if coefficients.alpha is None:
            share = coefficients.pull / len(self._local)
        else:
            D, share = D * coefficients.alpha(U.gram(D)).to(D)[U.owner], coefficients.pull
        self._H.add_(D, alpha=share)  # Eq. (7): W ← W + η D
        through = U.through(D)
        if self._apart is not None:
            self._apart.sub_(through, alpha=share)
            self._c, self._sigma, self._F = 0.0, 1.0, self._H
            self._gap = self._apart * U.s * coefficients.hold
            self._L = -self._gap  # Eq. (11)
            return
        self._gap.sub_(through, alpha=share)
        keep = 1 - coefficients.follow
        self._L.mul_(keep).addcmul_(self._gap, U.s, value=-coefficients.hold)
        self._F.mul_(keep).add_(self._H, alpha=coefficients.follow)
        self._gap.mul_(keep + coefficients.hold * U.s)
        self._c, self._sigma = keep * self._c, keep * self._sigma + coefficients.follow

    def merged(self) -> Tensor:
        return self._W0 - self._U.back(self._H)

    def client(self, index: int) -> Tensor:
        shared = self._sigma * self._W0 - self._U.back(self._F)
        return self._c * self._local[index] + shared + self._U.one(self._L, index)

    def mean(self) -> Tensor:
        own = self._U.back(self._L / len(self._local) - self._F)
        return self._c * self._mean + self._sigma * self._W0 + own


class SeparateIterates:
    """W and all V_i as dense matrices. Norm needs this."""

    def __init__(
        self,
        start: Float[Tensor, "g o d"],
        local: Sequence[Tensor],
        spectra: Sequence[Spectrum | Diagonal],
        coefficients: Coefficients,
    ):
        self._coefficients = coefficients
        self._W, self._V = start, list(local)
        self._P = [spectrum.to(dtype=start.dtype) for spectrum in spectra]

    def step(self) -> None:
        coefficients = self._coefficients
        pulls = torch.stack([P.after(self._W - V) for V, P in zip(self._V, self._P, strict=True)])
        n = len(pulls)
        if coefficients.alpha is None:
            self._W = self._W - coefficients.pull * pulls.mean(0)
        else:
            flat = pulls.reshape(n, -1).double()
            alpha = coefficients.alpha(4 * flat @ flat.T).to(pulls)
            self._W = self._W - coefficients.pull * torch.einsum("n,ngod->god", alpha, pulls)
        for i, P in enumerate(self._P):
            gap = self._W - self._V[i]
            move = gap - (coefficients.hold / coefficients.follow) * P.after(gap)
            length = move.norm(dim=-1, keepdim=True)
            self._V[i] = self._V[i] + coefficients.follow * move / length.where(length > 0, torch.ones_like(length))

    def merged(self) -> Tensor:
        return self._W

    def client(self, index: int) -> Tensor:
        return self._V[index]

    def mean(self) -> Tensor:
        return torch.stack(self._V).mean(0)


def iterates(
    start: Tensor, local: Sequence[Tensor], spectra: Sequence[Spectrum | Diagonal], coefficients: Coefficients
) -> Iterates:
    """The iterates of one layer, in the cheaper form that the coefficients allow."""
    if coefficients.normalised:
        return SeparateIterates(start, local, spectra, coefficients)
    # A rest lies outside the columns of U, so every direction becomes a column.
    whole = [P.completed() if isinstance(P, Spectrum) else P for P in spectra]
    return SharedIterates(start, local, whole, coefficients)
