"""Weighted means of many tensors, in the memory of one or two, and as exact as a few float32 roundings allow.

    m ← m + w / (Σ w) · (x − m)

A plain sum of n float32 numbers loses digits as n grows. A sum in float64 takes twice the memory and several times the
time. Here the means of `GROUP` tensors are made first, then the means of `GROUP` such means, and so on, so that each
number is rounded a few times only. Equal tensors are their own mean, bit for bit, and a mean cannot overflow unless a
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


def has_mean(tensor: Tensor) -> bool:
    """Whether a mean of such tensors means something. Of whole numbers and truth values it does not."""
    return tensor.is_floating_point() or tensor.is_complex()


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute a mean in: float64 for float64, float32 for all that are shorter, complex128 for all complex
    numbers."""
    return torch.complex128 if dtype.is_complex else torch.promote_types(dtype, torch.float32)


def as_working(tensor: Tensor) -> Tensor:
    """The tensor in the dtype to compute a mean in; itself if it has that dtype."""
    return tensor.to(working(tensor.dtype))


Tensors = list[Tensor]


@dataclass(slots=True)
class _Group:
    """The mean of a few additions, or of a few groups."""

    mean: Tensors
    weight: float | Tensors
    own: bool
    """Whether it is in memory of its own, and not in that of tensors that somebody added."""
    count: int = 1


class RunningMean:
    """The weighted mean of lists of tensors that come one list at a time: of the first tensors, of the second, ...

    A weight is a number for all tensors, or a list of tensors with one weight for each entry.

    Args:
        out: where the mean is made. By default in new memory.
    """

    def __init__(self, out: Tensors | None = None):
        self._spare = out
        self._shares: Tensors | None = None
        self._levels: list[_Group | None] = []

    def add(self, values: Tensors, weight: float | Tensors) -> None:
        """Add tensors in dtypes that means are computed in. They must not change before the result was asked for."""
        self._add(0, _Group(values, weight, False))

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
        """Make of two means that of both. The second one's memory is used again."""
        total, shares = self._weigh(group, new)
        if group.own and isinstance(shares, float):
            torch._foreach_lerp_(group.mean, new.mean, shares)
        else:
            out = group.mean if group.own else self._spare or [torch.empty_like(mean) for mean in group.mean]
            several = [shares] * len(out) if isinstance(shares, float) else shares
            for mean, other, share, place in zip(group.mean, new.mean, several, out, strict=True):
                torch.lerp(mean, other, share, out=place)  # type: ignore[call-overload]
            if not group.own:
                group.mean, group.own, self._spare = out, True, None
        group.weight = total
        if new.own:
            self._spare = new.mean

    def _weigh(self, group: _Group, new: _Group) -> tuple[float | Tensors, float | Tensors]:
        """The sum of two weights, and the second one's share of it."""
        one, other = group.weight, new.weight
        if isinstance(one, float) or isinstance(other, float):
            assert isinstance(one, float)
            assert isinstance(other, float)
            return one + other, other / (one + other)
        if group.own:
            torch._foreach_add_(one, other)
        else:
            one = list(torch._foreach_add(one, other))
        self._shares = self._shares or [torch.empty_like(weight) for weight in one]
        for weight, total, share in zip(other, one, self._shares, strict=True):
            # Where nobody has a weight the mean says nothing, but it must be a number.
            torch.div(weight, total, out=share).nan_to_num_(0.0)
        return one, self._shares

    def result(self) -> tuple[Tensors, float | Tensors]:
        """The mean and the sum of the weights. If one list was added, they are that list and its weight themselves."""
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


def pieces(tensors: Mapping[str, Sequence[Tensor]], at_once: int = 1) -> Iterator[list[Piece]]:
    """Cut tensors into pieces, and give out lists of pieces that hold about `BLOCK` numbers together.

    Each name stands for tensors of one shape. They stay whole if one of them is on a GPU or not contiguous.

    Args:
        at_once: how many tensors are made of such a list. With more, the lists are shorter.
    """
    size = BLOCK // at_once * torch.get_num_threads()
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
