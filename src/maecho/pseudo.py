"""Inputs that look like a client's, drawn from the Gaussians that it has told of them.

    x = μ_k + U_k diag(√s_k) ξ + √r_k ζ,   ξ, ζ ~ N(0, I)

for every class k (or part of one), in proportion to its count; r_k, coordinate by coordinate, is the variance of the
directions that were cut off. Drawn in chunks and drawn again whenever they are asked
for, the same each time, so nothing of them is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maecho import cosines
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
        rng = torch.Generator().manual_seed(self.seed)  # on the CPU: the same draws on any device
        for k, count in enumerate(self.counts()):
            label = int(m.classes[k])
            for size in _sizes(count, self.chunk):
                x = draw(m, k, size, rng, self.dtype)
                yield x, None if label == NO_CLASS else torch.full((size,), label, device=x.device)


def draw(m: Moments, k: int, size: int, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """So many inputs from one Gaussian, on the device of the moments."""
    group = 0 if len(m.covariances.values) == 1 else k
    assert m.covariances.basis is not None
    U = m.covariances.basis[group].to(dtype)
    root = (U * m.covariances.values[group].clamp(min=0).sqrt().to(U)).mT
    x = m.means[k].to(dtype) + torch.randn(size, len(root), generator=rng, dtype=dtype).to(U.device) @ root
    if m.residual is not None:
        rest = torch.randn(size, x.shape[1], generator=rng, dtype=dtype).to(U.device)
        rest *= m.residual[group].to(dtype).sqrt()
        x = x + (cosines.back(rest, m.shape) if m.in_cosines else rest)
    return x.reshape(size, *m.shape)


def _sizes(count: int, chunk: int) -> list[int]:
    """Parts of nearly one size, none above `chunk`."""
    parts = math.ceil(count / chunk)
    return [count // parts + (i < count % parts) for i in range(parts)]
