"""Sums over clients of G_i and of W_i G_i, for symmetric G_i in factored form, without building any G_i.

With G_i = U_i diag(s_i) U_iᵀ + t_i (I − U_i U_iᵀ) both are sums of thin products:

    Σ G_i = U diag(s − t) Uᵀ + (Σ t_i) I,    Σ W_i G_i = [W_1 U_1 … W_N U_N] diag(s − t) Uᵀ + Σ t_i W_i

with U = [U_1 … U_N]. Columns of several clients wait until one product of good size adds them all. Everything is in
float64. A G_i with a unit stands for D⁻¹ G_i D⁻¹ (units.py): then the columns are those of D⁻¹ U_i, and instead of
t_i I there is t_i D⁻².
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Dense, Diagonal, Total
from maecho.linalg.units import times_last

if TYPE_CHECKING:
    from jaxtyping import Float


class Sums:
    """Σ G_i and Σ W_i G_i of one layer, a client at a time. All G_i of a layer are of one form.

    Args:
        shrink: the factor for the entries of every G_i off its diagonal.
    """

    def __init__(self, shrink: float = 1.0):
        self._shrink = shrink
        self._gram = self._product = torch.zeros(0)
        self._diagonals: Diagonal | None = None
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rest = torch.zeros(0)
        self._bias = False
        """Whether the last input is the constant of a bias."""

    def add(self, W: Float[Tensor, "g o d"] | None, G: Spectrum | Diagonal) -> None:
        """Add the terms of one client. Without W there is no product."""
        W = (G.values.new_zeros(len(G.values), 0, G.width) if W is None else W).double()
        if isinstance(G, Diagonal):
            total = G.total()
            product = total.after(W)
            self._product = self._product.add_(product) if self._diagonals else product
            self._diagonals = self._diagonals.add_(total) if self._diagonals else total
            return
        s, U = G.values.double(), G.basis.double()
        if G.rest is not None:
            s = s - G.rest.double().unsqueeze(-1)
        if not self._gram.numel():
            self._gram = U.new_zeros(len(U), G.width, G.width)
            self._product, self._rest = torch.zeros_like(W), U.new_zeros(len(U), 1, G.width)
        if G.unit is not None:
            self._bias = True
            U = times_last(U.mT, 1 / G.unit).mT
        WU = W @ U
        WU *= s.unsqueeze(-2)
        if self._shrink != 1:
            diagonal = (U.square() @ s.unsqueeze(-1)).squeeze(-1)
            self._product += (1 - self._shrink) * W * diagonal.unsqueeze(-2)
        if G.rest is not None:
            rest = G.rest.double()[:, None, None].expand_as(self._rest)
            rest = rest if G.unit is None else times_last(rest, 1 / G.unit.double() ** 2)
            self._rest += rest
            self._product += rest * W
        self._waiting.append((s, U, WU))
        if sum(columns.shape[-1] for columns, _, _ in self._waiting) >= G.width:
            self._flush()

    @property
    def gram(self) -> Total:
        """Σ G_i."""
        if self._diagonals is not None:
            return self._diagonals
        self._flush()
        whole = Dense(self._gram, self._bias).shrunk(self._shrink)
        return whole.plus_identity(self._rest) if bool(self._rest.any()) else whole

    @property
    def product(self) -> Float[Tensor, "g o d"]:
        """Σ W_i G_i."""
        self._flush()
        return self._product

    def _flush(self) -> None:
        """Add the columns that wait to the sums."""
        if not self._waiting:
            return
        s, U, WU = (parts[0] if len(parts) == 1 else torch.cat(parts, -1) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        self._product += (self._shrink * WU if self._shrink != 1 else WU) @ U.mT
        self._gram += square(U, s)


def square(K: Float[Tensor, "g d n"], w: Float[Tensor, "g n"] | None = None) -> Float[Tensor, "g d d"]:
    """K Kᵀ, or K diag(w) Kᵀ. On a CPU half of the work is done, since the result is symmetric: NumPy calls the routine
    for that, torch does not."""
    if w is not None and K.numel() and bool((w < 0).any()):
        return (K * w.unsqueeze(-2)) @ K.mT
    if w is not None:
        K = K * w.sqrt().unsqueeze(-2)
    if K.device.type != "cpu" or K.dtype not in (torch.float32, torch.float64) or K.requires_grad:
        return K @ K.mT
    groups = [torch.from_numpy(A @ A.T) for A in K.numpy()]
    return torch.stack(groups) if len(groups) > 1 else groups[0].unsqueeze(0)
