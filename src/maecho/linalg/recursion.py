"""The projector of the MA-Echo release: a recursion on batch means.

Q starts as I. Each mean input r updates it, and P follows at the end:

    k = Q r,    Q ← Q − c k kᵀ / (a + rᵀ k),    P = I − Q.

The damping a is a fixed number beside squares of inputs, so P depends on the units of the data. With c = 1 on single
samples this is recursive least squares, and P is the exact projector with z = a. The release uses
c = ½, and r is the mean of a batch. The rank of P is at most the number of batches. So Q is kept as Q₀ − K diag(w) Kᵀ,
and no matrix of size d by d is built until there are many columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum

if TYPE_CHECKING:
    from jaxtyping import Float

STEP = 0.5
"""c of the release."""
DAMPING = 0.01**0.8
"""a of the release for fully connected layers."""
DAMPING_CONVOLUTION = 0.00001**0.8
"""a of the release for convolutions."""


class MeanRecursion:
    """Computes P of one layer from one mean input after the other, in float64."""

    def __init__(self, groups: int, d: int, damping: float = DAMPING, step: float = STEP):
        self.damping, self.step = damping, step
        # With more columns than this, a product with K costs as much as one with a dense Q: fold them into Q₀.
        self._room = max(256, d // 4)
        self._Q: Tensor | None = None  # None: the identity
        self._K = torch.zeros(groups, d, min(self._room, 64), dtype=torch.float64)
        self._w = torch.zeros(groups, self._K.shape[-1], dtype=torch.float64)
        self._used = 0

    def add(self, means: Float[Tensor, "g n d"]) -> None:
        for r in means.to(self._K).unbind(1):
            self._add(r)

    def _add(self, r: Float[Tensor, "g d"]) -> None:
        if self._used == self._K.shape[-1]:
            self._make_room()
        K, w = self._K[..., : self._used], self._w[:, : self._used]
        inner = (K.mT @ r.unsqueeze(-1)).squeeze(-1)
        Qr = r if self._Q is None else (self._Q @ r.unsqueeze(-1)).squeeze(-1)
        k = Qr - (K @ (w * inner).unsqueeze(-1)).squeeze(-1)
        self._K[..., self._used] = k
        self._w[:, self._used] = self.step / (self.damping + (r * k).sum(-1))
        self._used += 1

    def _make_room(self) -> None:
        groups, d, size = self._K.shape
        if size < self._room:
            grown = min(2 * size, self._room)
            self._K = torch.cat([self._K, self._K.new_zeros(groups, d, grown - size)], -1)
            self._w = torch.cat([self._w, self._w.new_zeros(groups, grown - size)], -1)
        else:
            self._Q = self._folded()
            self._used = 0

    def _folded(self) -> Float[Tensor, "g d d"]:
        K, w = self._K[..., : self._used], self._w[:, : self._used]
        Q = torch.eye(K.shape[-2], dtype=K.dtype, device=K.device) if self._Q is None else self._Q
        return Q - (K * w.unsqueeze(-2)) @ K.mT

    def spectrum(self) -> Spectrum:
        """P = I − Q; its eigenvalues lie in [0, 1)."""
        if self._Q is None:
            P = Spectrum.of_factor(self._K[..., : self._used], self._w[:, : self._used])
        else:
            Q = self._folded()
            P = Spectrum.of_dense(torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device) - Q)
        return P.map(lambda s: s.clamp(max=1.0))
