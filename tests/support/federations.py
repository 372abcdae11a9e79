"""A small federation: clouds of four classes, and a network for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from support.clients import rng

Clients = list[tuple[Tensor, Tensor]]
CLASSES = 4


def clouds(count: int, held: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Clouds around a mean for each class, the same means for every seed."""
    draw = rng(seed)
    means = 3 * torch.randn(CLASSES, 12, generator=rng(99))
    y = torch.tensor(held)[torch.randint(0, len(held), (count,), generator=draw)]
    y[: len(held)] = torch.tensor(held)
    return means[y] + torch.randn(count, 12, generator=draw), y


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES))
