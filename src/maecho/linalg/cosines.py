"""The orthonormal cosine transform of inputs that have axes, such as images, along all of them (type II; back: III).

Neighbouring pixels are alike, and so are colours of one pixel: what is left of the covariance of images is nearly
diagonal in these coordinates, not in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def matrix(n: int) -> Tensor:
    """Rows are cosines of rising frequency."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    C = math.sqrt(2 / n) * torch.cos(math.pi * k * (i + 0.5) / n)
    C[0] /= math.sqrt(2)
    return C


def forth(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows [..., d] of inputs of this shape, d = prod(shape), in coordinates of cosines."""
    return _along_all(x, shape, [matrix(n) for n in shape])


def back(x: Tensor, shape: Sequence[int]) -> Tensor:
    return _along_all(x, shape, [matrix(n).mT for n in shape])


def variances(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Of entries, from variances [..., d] of cosines that have nothing to do with each other."""
    return _along_all(x, shape, [matrix(n).mT ** 2 for n in shape])


def _along_all(x: Tensor, shape: Sequence[int], matrices: Sequence[Tensor]) -> Tensor:
    y = x.reshape(*x.shape[:-1], *shape)
    for axis, M in enumerate(matrices, start=-len(shape)):
        y = torch.tensordot(y, M.to(y), ([axis], [1])).movedim(-1, axis)
    return y.reshape(x.shape)
