"""Networks whose neurons do not lie where one would first look: on other axes than the channels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from maecho.network.spaces import Place, Space
from support.clients import rng


class Mean(nn.Module):
    """The mean over one axis."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axis)


class Swap(nn.Module):
    """Exchanges the last two axes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class NormedTokens(nn.Module):
    """Linear layers on tokens, with a normalisation of each token between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(torch.relu(self.norm(self.one(x)))).flatten(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=rng())


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape, generator=rng())


Make = Callable[[], nn.Module]

ODD: dict[str, tuple[Make, Tensor]] = {
    "embedding, flatten": (
        lambda: nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(30, 7), nn.ReLU(), nn.Linear(7, 3)),
        tokens(12, 5),
    ),
    "linear on tokens, flatten": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(30, 7), nn.ReLU(), nn.Linear(7, 3)),
        numbers(12, 5, 4),
    ),
    "mean over channels": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 6, 3, padding=1), nn.ReLU(), Mean(1), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)
        ),
        numbers(12, 2, 6),
    ),
    "flatten places": (
        lambda: nn.Sequential(nn.Conv2d(2, 9, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.Linear(9, 4), Mean(1)),
        numbers(12, 2, 3, 3),
    ),
    "length equals channels": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Flatten(),
                              nn.Linear(24, 3)),
        numbers(12, 2, 6),
    ),
    "batch norm of tokens": (NormedTokens, numbers(12, 5, 6)),
    "pooled features": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.AvgPool1d(3, 1, 1), nn.ReLU(), nn.Linear(6, 4), nn.Flatten(),
                              nn.Linear(20, 3)),
        numbers(12, 5, 4),
    ),
    "swapped": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Swap(), nn.Conv1d(5, 5, 1), nn.ReLU(), nn.Flatten(),
                              nn.Linear(25, 3)),
        numbers(12, 5, 4),
    ),
}  # fmt: skip
"""A network, and inputs for it."""

ASSUMED: dict[str, Space] = {
    "embedding, flatten": Space("0", 6, (Place("0.weight", 1), Place("2.weight", 1, 5))),
    "linear on tokens, flatten": Space("0", 6, (Place("0.weight", 0), Place("0.bias", 0), Place("3.weight", 1, 5))),
    "mean over channels": Space("0", 6, (Place("0.weight", 0), Place("0.bias", 0), Place("3.weight", 1))),
    "flatten places": Space("0", 9, (Place("0.weight", 0), Place("0.bias", 0), Place("3.weight", 1))),
    "length equals channels": Space("0", 6, (Place("0.weight", 0), Place("0.bias", 0), Place("2.weight", 1))),
    "batch norm of tokens": Space("two", 4, (Place("two.weight", 0), Place("two.bias", 0), Place("head.weight", 1, 5))),
    "pooled features": Space("0", 6, (Place("0.weight", 0), Place("0.bias", 0), Place("3.weight", 1))),
}
"""What maecho assumed before it looked at axes."""
