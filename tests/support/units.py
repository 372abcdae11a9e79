"""The unit of the constant input of a bias, written out for comparison with what the package does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import maecho


def scales(uploads: Sequence[maecho.Upload], layer: str, weighting: str = "examples") -> Tensor:
    """The diagonal of D: ones, and last c, the root mean square of all clients' inputs of a layer with a bias."""
    grams = [upload.statistics["gram"][layer].dense()[0].double() for upload in uploads]
    grams = [G / (1 if weighting == "examples" else G[-1, -1]) for G in grams]
    total = torch.stack(grams).sum(0)
    D = torch.ones(len(total), dtype=torch.float64)
    D[-1] = (total.diagonal()[:-1].mean() / total[-1, -1]).sqrt()
    return D
