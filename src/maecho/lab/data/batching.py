"""Divides a data set into batches that can be read several times, in order or shuffled anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches (inputs, labels) that can be read any number of times; see `batches`."""

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    size: int
    rng: torch.Generator | None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"batches: size must be at least 1, got {self.size}")
        if len(self.x) != len(self.y):
            raise ValueError(f"batches: one label an input, got {len(self.x)} inputs and {len(self.y)} labels")

    def __len__(self) -> int:
        return -(-len(self.y) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.rng is None:
            yield from zip(torch.split(self.x, self.size), torch.split(self.y, self.size), strict=True)
            return
        order = torch.randperm(len(self.y), generator=self.rng).to(self.y.device)
        for rows in torch.split(order, self.size):
            yield self.x[rows], self.y[rows]


def batches(x: Tensor, y: Tensor, size: int = 64, rng: torch.Generator | None = None) -> Batches:
    """Batches that can be passed over again; with `rng` (on the CPU) every pass has a new order."""
    return Batches(x, y, size, rng)
