"""Values of statistics, compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from maecho.linalg.gaussians import Gaussians


def close(one: Any, other: Any, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """Whether two values say the same; matrices are compared as matrices, for their eigenvectors may be others."""
    pairs = [(one[name], other[name]) for name in {**one, **other}] if isinstance(one, Mapping) else [(one, other)]

    def dense(part: Any) -> list[Tensor]:
        if isinstance(part, Gaussians):
            return [part.classes, part.counts, part.means, *(c.dense() for c in part.covariances)]
        return [part] if isinstance(part, Tensor) else [part.dense()]

    return all(
        a.shape == b.shape
        and torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol * float(a.double().abs().max() + 1))
        for left, right in pairs
        for a, b in zip(dense(left), dense(right), strict=True)
    )
