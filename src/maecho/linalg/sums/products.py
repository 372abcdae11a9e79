"""Sums of x xᵀ over many rows x, in float64 where it matters and at half the work of a plain product.

Only blocks on and above the diagonal are computed. Rows of float32 are multiplied in float32, a few at a time, and
added up in float64. The error is then below 1e-6 of the largest entry, however many rows there are, since no float32
sum is longer than PIECE. The first rows, as many as they are wide, are multiplied in float64: fewer rows than inputs
have a sum of low rank, which must not be lost in round-off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

PIECE = 1024
"""How many rows are multiplied at a time. Fewer would cost as much for adding up the products as for making them."""
NARROW = 64
"""Products of rows no longer than this stay in float64. They cost little."""
BLOCKS = 4
"""Into how many parts long rows are cut, so that 10 of 16 blocks are computed."""
LARGE = 2.0**20
"""Numbers between 1 / LARGE and LARGE can be squared and added in float32."""


class SquareSums:
    """Σ x xᵀ of rows that come in batches, one sum for each group, in float64 on the device of the first rows."""

    def __init__(self, groups: int, d: int, device: torch.device | None = None):
        self._sums = torch.zeros(groups, d, d, dtype=torch.float64, device=device)
        self._rows = 0
        self._waiting: Tensor | None = None
        self._filled = 0
        size = d if d <= NARROW else -(-d // BLOCKS)
        self._blocks = [slice(start, min(start + size, d)) for start in range(0, d, max(1, size))]

    def add(self, rows: Float[Tensor, "g n d"]) -> None:
        """Rows of any real dtype. They are copied, and wait until there are enough for a product."""
        if self._waiting is not None and self._waiting.dtype != rows.dtype:
            self._multiply()
            self._waiting = None
        while rows.shape[1]:
            if self._waiting is None:
                self._waiting = rows.new_empty(rows.shape[0], PIECE, rows.shape[2])
            some, rows = rows[:, : PIECE - self._filled], rows[:, PIECE - self._filled :]
            self._waiting[:, self._filled : self._filled + some.shape[1]] = some
            self._filled += some.shape[1]
            if self._filled == PIECE:
                self._multiply()

    def _multiply(self) -> None:
        """Add the products of the rows that wait."""
        if self._waiting is None or not self._filled:
            return
        rows, self._filled = self._waiting[:, : self._filled], 0
        d = rows.shape[-1]
        first = max(0, d - self._rows) if single(rows, d) else rows.shape[1]
        self._rows += rows.shape[1]
        self._add(rows[:, :first].double(), 1.0)
        self._add(*scaled(rows[:, first:].float()))

    def _add(self, x: Tensor, factor: float) -> None:
        if not x.shape[1]:
            return
        for i, left in enumerate(self._blocks):
            for right in self._blocks[i:]:
                self._sums[:, left, right].add_(x[..., left].mT @ x[..., right], alpha=factor)

    def add_sums(self, sums: Float[Tensor, "g d d"], rows: int) -> None:
        """Add the sum of so many rows."""
        self._sums += sums
        self._rows += rows

    @property
    def width(self) -> int:
        return self._sums.shape[-1]

    @property
    def few(self) -> bool:
        """Whether there are fewer rows than inputs so far."""
        return self._rows + self._filled < self._sums.shape[-1]

    def dense(self) -> Float[Tensor, "g d d"]:
        """The sum, symmetric."""
        self._multiply()
        for i, left in enumerate(self._blocks):
            own = self._sums[:, left, left].triu()
            self._sums[:, left, left] = own + own.triu(1).mT
            for right in self._blocks[i + 1 :]:
                self._sums[:, right, left] = self._sums[:, left, right].mT
        return self._sums


def single(x: Tensor, d: int) -> bool:
    """Whether products of these numbers, which make rows of length d, may be of float32. Torch can be told to round
    such products to bfloat16."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return exact and x.dtype != torch.float64 and d > NARROW and x.device.type == "cpu"


def scaled(x: Tensor) -> tuple[Tensor, float]:
    """Numbers that float32 can square, and the factor that brings a product of them back. Both are exact."""
    if not x.numel():
        return x, 1.0
    low, high = x.aminmax()
    largest = max(-float(low), float(high))
    if 1 / LARGE < largest < LARGE or not 0 < largest < float("inf"):
        return x, 1.0
    scale = 2.0 ** math.floor(math.log2(largest))
    return x / scale, scale * scale
