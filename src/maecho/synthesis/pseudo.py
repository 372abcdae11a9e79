"""Inputs that look like a client's, drawn from the means and covariances that the client has uploaded.

    x = μ_k + U_k diag(√s_k) ξ + √r_k ζ

Each class k (or each Gaussian of a class) gets draws in proportion to its count. r_k holds, for every coordinate, the
variance along the directions that were cut off. ξ is white, and every entry of ζ has variance 1. Both are Gaussian. For
images they may come from white noise with edges w (see leaves.py): then ξ = Uᵀw, and ζ is the rest of w, rescaled.

Inputs are drawn in chunks. They can be drawn anew in every pass, with the same result. `Drawn` keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.gaussians import NO_CLASS, Gaussians
from maecho.randomness import seed_of
from maecho.synthesis import leaves

Noise = Literal["leaves", "gaussian"]
NOISES = ("leaves", "gaussian")


def seed_for(seed: int, client: str) -> int:
    """A seed for one client, which gives it a stream of random numbers of its own. It does not depend on the order of
    clients."""
    return seed_of(f"{seed}/{client}")


@dataclass(frozen=True)
class PseudoInputs:
    """Batches (inputs, labels) drawn from a client's moments. The labels are None if the client has none.

    Args:
        moments: the moments that the client has uploaded.
        draws: how many inputs to draw. Every Gaussian gets at least one.
        chunk: how many inputs a batch holds at most.
        seed: the seed of the draws.
        dtype: the dtype of the inputs.
        noise: "leaves" gives images edges. With "gaussian", and for inputs that are not images, the noise is Gaussian.
    """

    moments: Gaussians
    draws: int
    chunk: int = 1000
    seed: int = 0
    dtype: torch.dtype = torch.float32
    noise: Noise = "gaussian"

    def counts(self) -> list[int]:
        """How many inputs to draw from each Gaussian: in proportion to its examples, so that sums over draws stand for
        sums over examples, but at least one."""
        given = self.moments.counts.tolist()
        total = sum(given)
        return [max(1, round(self.draws * count / total)) for count in given]

    @property
    def bytes(self) -> int:
        """The size of all inputs together."""
        return sum(self.counts()) * math.prod(self.moments.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        """The number of chunks."""
        return sum(len(_sizes(count, self.chunk)) for count in self.counts())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        m = self.moments
        rng = torch.Generator().manual_seed(self.seed)  # on the CPU: the same draws on any device
        for k, count in enumerate(self.counts()):
            label = int(m.classes[k])
            for size in _sizes(count, self.chunk):
                x = draw(m, k, size, rng, self.dtype, self.noise)
                yield x, None if label == NO_CLASS else torch.full((size,), label, device=x.device)


class Drawn:
    """Inputs that are drawn in the first pass over them, and kept for the next."""

    def __init__(self, inputs: PseudoInputs):
        self._inputs = inputs
        self._kept: list[tuple[Tensor, Tensor | None]] | None = None

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        if self._kept is not None:
            yield from self._kept
            return
        found = []
        for batch in self._inputs:
            found.append(batch)
            yield batch
        self._kept = found


def draw(
    m: Gaussians, k: int, size: int, rng: torch.Generator, dtype: torch.dtype, noise: Noise = "gaussian"
) -> Tensor:
    """Draw `size` inputs with the mean and covariance of the Gaussian k, on the device of the moments."""
    group = 0 if len(m.covariances) == 1 else k
    covariance = m.covariances[group]
    assert covariance.basis is not None
    U = covariance.basis[0].to(dtype)
    root = (U * covariance.values[0].clamp(min=0).sqrt().to(U)).mT
    painted = noise == "leaves" and leaves.is_image(m.shape)
    if painted:
        w = leaves.draw_white(m.shape, size, rng, U.device).to(dtype)
        along = w @ U
    else:
        along = torch.randn(size, len(root), generator=rng, dtype=dtype).to(U.device)
    x = m.means[k].to(dtype) + along @ root
    if m.residual is not None:
        if painted:
            rest = _outside(w - along @ U.mT, U, m)
        else:
            rest = torch.randn(size, U.shape[0], generator=rng, dtype=dtype).to(U.device)
        rest = rest * m.residual[group].to(dtype).sqrt()
        x = x + (cosines.back(rest, m.shape) if m.in_cosines else rest)
    return x.reshape(size, *m.shape)


def _outside(w: Tensor, U: Tensor, m: Gaussians) -> Tensor:
    """The part of white noise outside of the directions U, in the coordinates of the residual, scaled to variance 1."""
    rows = U.mT
    if m.in_cosines:
        w, rows = cosines.forth(w, m.shape), cosines.forth(rows, m.shape)
    return w * (1 - rows.square().sum(0)).clamp(min=1e-6).rsqrt()


def _sizes(count: int, chunk: int) -> list[int]:
    """Split a count into parts of nearly equal size, none above `chunk`."""
    parts = math.ceil(count / chunk)
    return [count // parts + (i < count % parts) for i in range(parts)]
