"""Inputs that look like a client's, drawn from the Gaussians that it has told of them.

    x = μ_k + U_k diag(√s_k) ξ + √r_k ζ,   ξ, ζ ~ N(0, I)

for every class k (or part of one), in proportion to its count; r_k, entry by entry, is the variance of the directions
that were cut off. Drawn in chunks and drawn again whenever they are asked
for, the same each time, so nothing of them is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maecho.moments import NO_CLASS, Moments


def seed_for(seed: int, client: str) -> int:
    """Streams of random numbers that have nothing to do with each other, whatever the order of clients."""
    return int(hashlib.sha256(f"{seed}/{client}".encode()).hexdigest()[:12], 16)


@dataclass(frozen=True)
class PseudoInputs:
    """Batches (inputs, labels) drawn from a client's moments; inputs alone if it has no labels.

    Args:
        moments: what the client told.
        draws: how many inputs, at least one for every Gaussian.
        chunk: how many at a time.
        seed: of the draws.
        dtype: of the inputs.
    """

    moments: Moments
    draws: int
    chunk: int = 1000
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def counts(self) -> list[int]:
        """How many from each Gaussian: in proportion to its examples, so that sums over draws stand for sums over
        them, and none left out."""
        given = self.moments.counts.tolist()
        total = sum(given)
        return [max(1, round(self.draws * count / total)) for count in given]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        m = self.moments
        device = m.means.device
        rng = torch.Generator().manual_seed(self.seed)  # on the CPU: the same draws on any device
        shared = len(m.covariances.values) == 1
        for k, count in enumerate(self.counts()):
            group = 0 if shared else k
            label = int(m.classes[k])
            assert m.covariances.basis is not None
            U = m.covariances.basis[group].to(self.dtype)
            root = (U * m.covariances.values[group].clamp(min=0).sqrt().to(U)).mT
            mean = m.means[k].to(self.dtype)
            for size in _sizes(count, self.chunk):
                noise = torch.randn(size, len(root), generator=rng, dtype=self.dtype).to(device)
                x = mean + noise @ root
                if m.residual is not None:
                    rest = torch.randn(size, x.shape[1], generator=rng, dtype=self.dtype).to(device)
                    x = x + rest * m.residual[group].to(self.dtype).sqrt()
                x = x.reshape(size, *m.shape)
                yield x, None if label == NO_CLASS else torch.full((size,), label, device=device)


def _sizes(count: int, chunk: int) -> list[int]:
    """Parts of nearly one size, none above `chunk`."""
    parts = math.ceil(count / chunk)
    return [count // parts + (i < count % parts) for i in range(parts)]
