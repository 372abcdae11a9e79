"""The Gram matrix of all patches of maps, from shifts of the maps instead of the patches themselves.

A patch at place q has the entries x[c, q + i] for channels c and offsets i under the kernel. So

    G[(c, i), (c', j)] = Σ_q x[c, q + i] x[c', q + j] = Σ_p x[c, p] x[c', p + s]    with p = q + i, s = j − i.

The product depends on the shift s alone, but for the places p that the sum runs over, which start at i. Nearly all
places of a map are common to all offsets. So each axis is cut into these common places and single ones at both ends,
and every part of the map is multiplied once for each shift. A kernel of 3 × 3 has 13 shifts, up to sign, where it has
45 pairs of offsets.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

AT_ONCE = 8192
"""How many places a product of float32 adds up at most."""
Part = tuple[int, int]
"""Places along one axis: the first, and the one after the last."""


def patch_gram(
    maps: Float[Tensor, "g n h w c"], kernel: tuple[int, int]
) -> tuple[Float[Tensor, "g d d"], Float[Tensor, "g d"]]:
    """Σ x xᵀ and Σ x over all patches x at stride 1, in float64.

    The entries of a patch are ordered by channel, then by place. Products are of the dtype of the maps. The kernel must
    fit into the maps.
    """
    g, _, height, width, c = maps.shape
    rows, columns = (_parts(size, k) for size, k in zip((height, width), kernel, strict=True))
    offsets = [(down, across) for down in range(kernel[0]) for across in range(kernel[1])]
    G = maps.new_zeros(g, c, len(offsets), c, len(offsets), dtype=torch.float64)
    sums = maps.new_zeros(g, c, len(offsets), dtype=torch.float64)
    totals = {(a, b): _cut(maps, a, b).sum((1, 2, 3), dtype=torch.float64) for a in rows for b in columns}
    for n, i in enumerate(offsets):
        for part in _of(i, rows, columns, (height, width), kernel):
            sums[:, :, n] += totals[part]
    for s in _shifts(kernel):
        pairs = [(i, j) for i in offsets for j in offsets if (j[0] - i[0], j[1] - i[1]) == s]
        inside = [_of(i, rows, columns, (height, width), kernel) for i, _ in pairs]
        products = {part: _product(maps, *part, s) for part in dict.fromkeys(itertools.chain(*inside))}
        for (i, j), parts in zip(pairs, inside, strict=True):
            block = sum((products[part] for part in parts[1:]), products[parts[0]])
            G[:, :, offsets.index(i), :, offsets.index(j)] = block
            G[:, :, offsets.index(j), :, offsets.index(i)] = block.mT
    d = c * len(offsets)
    return G.reshape(g, d, d), sums.reshape(g, d)


def _parts(size: int, k: int) -> list[Part]:
    """Single places at both ends of an axis of this size, and between them the places that all offsets share."""
    places = size - k + 1
    low, high = min(k - 1, places), max(k - 1, places)
    if k - 1 >= places:  # no place is shared
        return [(p, p + 1) for p in range(size)]
    return [*((p, p + 1) for p in range(low)), (low, high), *((p, p + 1) for p in range(high, size))]


def _of(
    offset: tuple[int, int], rows: list[Part], columns: list[Part], size: tuple[int, int], kernel: tuple[int, int]
) -> list[tuple[Part, Part]]:
    """The parts of a map that an entry of the patch with this offset comes from."""
    chosen = [
        [part for part in parts if i <= part[0] and part[1] <= i + whole - k + 1]
        for i, parts, whole, k in zip(offset, (rows, columns), size, kernel, strict=True)
    ]
    return [(row, column) for row in chosen[0] for column in chosen[1]]


def _shifts(kernel: tuple[int, int]) -> list[tuple[int, int]]:
    """One of every shift and its opposite."""
    down, across = kernel
    return [(0, s) for s in range(across)] + [(r, s) for r in range(1, down) for s in range(1 - across, across)]


def _cut(maps: Tensor, rows: Part, columns: Part, shift: tuple[int, int] = (0, 0)) -> Tensor:
    (top, bottom), (left, right), (down, across) = rows, columns, shift
    return maps[:, :, top + down : bottom + down, left + across : right + across]


def _product(maps: Tensor, rows: Part, columns: Part, shift: tuple[int, int]) -> Float[Tensor, "g c c"]:
    """Σ_p x[p] x[p + shift]ᵀ over the places p of one part, in float64."""
    x, y = _cut(maps, rows, columns), _cut(maps, rows, columns, shift)
    g, _, height, width, c = x.shape
    total = maps.new_zeros(g, c, c, dtype=torch.float64)
    size = max(1, AT_ONCE // (height * width))
    for some, other in zip(x.split(size, 1), y.split(size, 1), strict=True):
        total += some.reshape(g, -1, c).mT @ other.reshape(g, -1, c)
    return total
