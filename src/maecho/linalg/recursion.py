"""The projector of the MA-Echo release: a recursion on means of inputs.

Q starts as I. Each mean input r updates it, and P follows at the end:

    k = Q r,    Q ← Q − c k kᵀ / (a + rᵀ k),    P = I − Q.

The damping a is a fixed number beside squares of inputs, so P depends on the units of the data. With c = 1 on single
samples this is recursive least squares, and P is the exact projector with z = a. The release uses c = ½, and r is the
mean of a batch. The rank of P is at most the number of means. So Q is kept as Q₀ − K diag(w) Kᵀ,
and no matrix of size d by d is built until there are many columns.

Means are added in blocks. All k of a block are combinations of the columns of Z = Q R, where R holds the block's means.
With S = Rᵀ Z, which is small, m_ij = k_iᵀ r_j and w_i = c / (a + m_ii) follow by elimination, and then

    Z = K M    with M unit upper triangular, M_ij = w_i m_ij for i < j.

So the steps of one mean are small ones in the block's own numbers. All that is as long as d is a product of matrices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
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
BLOCK = 64
"""The most means of a block. Twice as many cost four times as much elimination, and larger products gain less."""


ROUND_OFF = 64 * torch.finfo(torch.float64).eps
"""What is left of a direction that came before is known to this share of its square. In usual units that is far
below the damping."""


class MeanRecursion:
    """Computes P of one layer from one mean input after the other, in float64, on the device of the first means."""

    def __init__(self, groups: int, d: int, damping: float = DAMPING, step: float = STEP):
        self.damping, self.step = damping, step
        # With more columns than this, a product with K costs as much as one with a dense Q: fold them into Q₀.
        self._room = max(256, d // 4)
        self._Q: Tensor | None = None  # None: the identity
        self._K = torch.zeros(groups, d, 0, dtype=torch.float64)
        self._w = torch.zeros(groups, 0, dtype=torch.float64)
        self._used = 0
        self._waiting: list[Tensor] = []

    def add(self, means: Float[Tensor, "g n d"]) -> None:
        """Add means. They wait until they fill a block."""
        if not self._waiting and not self._used and self._Q is None:
            self._K, self._w = self._K.to(means.device), self._w.to(means.device)
        self._waiting.append(means.to(self._K, copy=True))
        if sum(part.shape[1] for part in self._waiting) >= BLOCK:
            self.settle()

    def settle(self) -> None:
        """Add the means that wait."""
        if self._waiting:
            means, self._waiting = torch.cat(self._waiting, 1), []
            for block in means.split(BLOCK, 1):
                self._add(block.mT)

    def _add(self, R: Float[Tensor, "g d m"]) -> None:
        count = R.shape[-1]
        if self._used + count > self._K.shape[-1]:
            self._make_room(count)
        K, w = self._K[..., : self._used], self._w[:, : self._used]
        Z = R if self._Q is None else self._Q @ R
        Z = Z - K @ (w.unsqueeze(-1) * (K.mT @ R))
        m, new = self._eliminated(R.mT @ Z, ROUND_OFF * R.square().sum(-2))
        M = (new.unsqueeze(-1) * m).triu(1) + torch.eye(count, dtype=m.dtype, device=m.device)
        after = self._used + count
        self._K[..., self._used : after] = torch.linalg.solve_triangular(M, Z, upper=True, left=False)
        self._w[:, self._used : after] = new
        self._used = after

    def _eliminated(
        self, S: Float[Tensor, "g m m"], least: Float[Tensor, "g m"]
    ) -> tuple[Float[Tensor, "g m m"], Float[Tensor, "g m"]]:
        """m_ij = k_iᵀ r_j for i ≤ j, and w. In numpy, whose calls on small matrices cost the least.

        An m_ii below `least` is round-off and counts as `least`.
        """
        left, floor = S.cpu().numpy().copy(), least.cpu().numpy()
        w = np.zeros(left.shape[:2])
        for i in range(left.shape[-1]):
            w[:, i] = self.step / (self.damping + np.maximum(left[:, i, i], floor[:, i]))
            row = left[:, i, i + 1 :]
            left[:, i + 1 :, i + 1 :] -= (w[:, i, None] * row)[:, :, None] * row[:, None, :]
        return torch.from_numpy(left).to(S.device), torch.from_numpy(w).to(S.device)

    def _make_room(self, count: int) -> None:
        groups, d, size = self._K.shape
        if size >= self._room:
            self._Q = self._folded()
            self._used = 0
        grown = max(min(2 * size, self._room), self._used + count)
        if grown > size:
            self._K = torch.cat([self._K, self._K.new_zeros(groups, d, grown - size)], -1)
            self._w = torch.cat([self._w, self._w.new_zeros(groups, grown - size)], -1)

    def _folded(self) -> Float[Tensor, "g d d"]:
        K, w = self._K[..., : self._used], self._w[:, : self._used]
        Q = torch.eye(K.shape[-2], dtype=K.dtype, device=K.device) if self._Q is None else self._Q
        return Q - (K * w.unsqueeze(-2)) @ K.mT

    def spectrum(self) -> Spectrum:
        """P = I − Q; its eigenvalues lie in [0, 1). Many are nearly 1, so no few of them lead."""
        self.settle()
        if self._Q is None:
            P = Spectrum.of_factor(self._K[..., : self._used], self._w[:, : self._used])
        else:
            Q = self._folded()
            P = Spectrum.of_dense(torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device) - Q)
        return replace(P, values=P.values.clamp(max=1.0))
