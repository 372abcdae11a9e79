"""Weighted means of many tensors, in the memory of one or two, and as exact as a few float32 roundings allow.

    m ← m + w / (Σ w) · (x − m)

A plain sum of n float32 numbers loses digits as n grows. A sum in float64 takes twice the memory and several times the
time. Here the means of `GROUP` tensors are made first, then the means of `GROUP` such means, and so on, so that a number
is rounded a few times only. Equal tensors are their own mean, bit for bit, and a mean cannot overflow unless a
difference of two tensors does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 8
"""How many tensors, or means of tensors, are taken together."""
BLOCK = 2**19
"""How many numbers a CPU thread looks at together: what is made of them stays in its cache."""


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute a mean in: float64 for float64, float32 for all that are shorter."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(slots=True)
class _Group:
    """The mean of a few tensors, or of a few groups."""

    mean: Tensor
    weight: float | Tensor
    own: bool
    """Whether it is in memory of its own, and not in that of a tensor that somebody added."""
    count: int = 1


class RunningMean:
    """The weighted mean of tensors that come one at a time. A weight is a number, or a tensor with one for each entry.

    Args:
        out: where the mean is made. By default in new memory.
    """

    def __init__(self, out: Tensor | None = None):
        self._spare = out
        self._levels: list[_Group | None] = []

    def add(self, value: Tensor, weight: float | Tensor) -> None:
        """Add a tensor in a dtype that means are computed in. It must not change before the result was asked for."""
        self._add(0, _Group(value, weight, False))

    def _add(self, level: int, new: _Group) -> None:
        if level == len(self._levels):
            self._levels.append(None)
        group = self._levels[level]
        if group is None:
            self._levels[level] = new
            return
        self._join(group, new)
        group.count += 1
        if group.count == GROUP:
            self._levels[level] = None
            group.count = 1
            self._add(level + 1, group)

    def _join(self, group: _Group, new: _Group) -> None:
        weight: float | Tensor
        if isinstance(group.weight, Tensor) and group.own:
            weight = group.weight.add_(new.weight)
        else:
            weight = group.weight + new.weight
        share = new.weight / weight
        if isinstance(share, Tensor):
            # Where both weights are 0 the mean says nothing, but it must be a number.
            share.nan_to_num_(0.0)
        if group.own:
            group.mean.lerp_(new.mean, share)
        else:
            group.mean, self._spare = torch.lerp(group.mean, new.mean, share, out=self._spare), None
            group.own = True
        group.weight = weight
        if new.own:
            self._spare = new.mean

    def result(self) -> tuple[Tensor, float | Tensor]:
        """The mean and the sum of the weights. Of a single tensor they are that tensor and its weight themselves."""
        groups = [group for group in self._levels if group is not None]
        low = groups[0]
        for high in groups[1:]:
            self._join(high, low)
            low = high
        self._levels = [low]
        return low.mean, low.weight


@dataclass(frozen=True)
class Piece:
    """Some entries of a named tensor."""

    name: str
    begin: int
    end: int
    whole: bool
    """Whether these are all entries. If not, they are counted in the order in which they lie in memory."""

    def of(self, tensor: Tensor) -> Tensor:
        """These entries of a tensor of this name, as a view."""
        return tensor if self.whole else tensor.view(-1)[self.begin : self.end]


def pieces(tensors: Mapping[str, Sequence[Tensor]]) -> Iterator[list[Piece]]:
    """Cut tensors into pieces, and give out lists of pieces that hold about `BLOCK` numbers together.

    Each name stands for tensors of one shape. They stay whole if one of them is on a GPU or not contiguous.
    """
    size = BLOCK * torch.get_num_threads()
    found: list[Piece] = []
    room = size
    for name, same in tensors.items():
        numel = same[0].numel()
        if numel <= size or any(tensor.is_cuda or not tensor.is_contiguous() for tensor in same):
            new = [Piece(name, 0, numel, True)]
        else:
            new = [Piece(name, begin, min(begin + size, numel), False) for begin in range(0, numel, size)]
        for piece in new:
            if found and piece.end - piece.begin > room:
                yield found
                found, room = [], size
            found.append(piece)
            room -= piece.end - piece.begin
    if found:
        yield found
