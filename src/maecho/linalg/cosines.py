"""The orthonormal cosine transform along every axis of an input, such as an image (type II; its inverse is type III).

Neighbouring pixels are alike, and so are the colours of one pixel. So the part of an image covariance that a cut
leaves out is nearly diagonal in these coordinates, but not in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def matrix(n: int) -> Tensor:
    """The transform of one axis of length n. Its rows are cosines of rising frequency."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    C = math.sqrt(2 / n) * torch.cos(math.pi * k * (i + 0.5) / n)
    C[0] /= math.sqrt(2)
    return C


def forth(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Transform rows [..., d] that are flattened inputs of this shape, d = prod(shape)."""
    return _along_all(x, shape, [matrix(n) for n in shape])


def back(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `forth`."""
    return _along_all(x, shape, [matrix(n).mT for n in shape])


def variances(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The variance of every entry of an input, from variances [..., d] of its cosines, which are uncorrelated."""
    return _along_all(x, shape, [matrix(n).mT ** 2 for n in shape])


def _along_all(x: Tensor, shape: Sequence[int], matrices: Sequence[Tensor]) -> Tensor:
    y = x.reshape(*x.shape[:-1], *shape)
    for axis, M in enumerate(matrices, start=-len(shape)):
        y = torch.tensordot(y, M.to(y), ([axis], [1])).movedim(-1, axis)
    return y.reshape(x.shape)
