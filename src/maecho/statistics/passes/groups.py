"""Means of groups of examples that a pass brings in pieces of any size."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

MOST_MEANS = 128
"""How many means there are at most, for each layer, if the client does not say how many examples a mean is over."""
ROOM = 2**26
"""How many bytes the means of one layer may take while their size is not fixed."""


def size_for(entries: int, most: int) -> int:
    """The smallest power of two such that groups of this size are no more than `most`."""
    size = 1
    while size * most < entries:
        size *= 2
    return size


class Means:
    """Means of groups of entries that come in pieces of any size.

    A group takes the next `of` entries, whatever pieces they come in. Entries may differ in shape, as sequences of
    several lengths do. Then each place is averaged over the entries of the group that have it.
    """

    def __init__(self, of: int) -> None:
        self._of = of
        self._sum: Tensor | None = None
        self._counts: Tensor | None = None
        self._entries = 0

    def add(self, x: Tensor) -> list[Tensor]:
        """Add entries [n, ...]. Returns the means of all groups that are full now, each [groups, ...]."""
        missing = self._of - self._entries if self._entries else 0
        found = []
        if missing:
            self._add(x[:missing])
            if self._entries == self._of:
                found += self.rest()
            x = x[missing:]
        whole = len(x) // self._of
        if whole:
            groups = x[: whole * self._of].unflatten(0, (whole, self._of))
            found.append(groups.sum(1, dtype=torch.float64) / self._of)
        if len(x) > whole * self._of:
            self._add(x[whole * self._of :])
        return found

    def rest(self) -> list[Tensor]:
        """The mean of the entries that are no full group yet, [1, ...]; nothing if there are none."""
        total, counts, self._sum, self._counts, self._entries = self._sum, self._counts, None, None, 0
        return [] if total is None or counts is None else [(total / counts.clamp(min=1)).unsqueeze(0)]

    def _add(self, x: Tensor) -> None:
        total = x.sum(0, dtype=torch.float64)
        counts = torch.full_like(total, len(x))
        if self._sum is not None and self._counts is not None:
            shape = [max(sizes) for sizes in zip(total.shape, self._sum.shape, strict=True)]
            total, before = _extended(total, shape), _extended(self._sum, shape)
            counts, counted = _extended(counts, shape), _extended(self._counts, shape)
            total, counts = before + total, counted + counts
        self._sum, self._counts = total, counts
        self._entries += len(x)


class FewMeans:
    """Means of at most `most` groups, of entries whose number is not known before they end.

    Groups are made as by `Means`. Their size is the smallest power of two with which they are no more than `most`. It
    begins at 1. Where there is no room for one more group, neighbours are joined in pairs. So the size depends on the
    number of entries, not on their pieces. As long as `most` groups take more than `room` bytes,
    `most` is halved.
    """

    def __init__(self, most: int, room: int = ROOM) -> None:
        self._most, self.room = most, room
        self.of = 1
        self._entries = 0
        self._sums: Tensor | None = None  # [most, ...]; unused groups hold zeros
        self._counts: Tensor | None = None  # None: all entries have one shape

    def add(self, x: Tensor) -> list[Tensor]:
        """Add entries [n, ...]. Returns nothing: a group may still grow."""
        self._fit(x)
        while len(x):
            if self._entries == self._most * self.of:
                self._join()
            groups, size = 1, -self._entries % self.of  # what the last group lacks
            if not size:
                groups = max(1, min(len(x) // self.of, self._most - self._groups))
                size = groups * self.of
            self._put(x[:size], groups)
            x = x[size:]
        return []

    def rest(self) -> list[Tensor]:
        """The means of all groups, [groups, ...]; nothing if there are no entries."""
        sums, counts, groups = self._sums, self._counts, self._groups
        if sums is None or not groups:
            return []
        if counts is None:
            counts = self._filled(sums)
        self._sums, self._counts, self._entries = None, None, 0
        return [sums[:groups].div_(counts[:groups].clamp(min=1))]

    @property
    def _groups(self) -> int:
        return -(-self._entries // self.of)

    def _put(self, x: Tensor, groups: int) -> None:
        """Add entries that fill so many groups, or a part of one."""
        assert self._sums is not None
        begin = self._entries // self.of
        where = (slice(begin, begin + groups), *map(slice, x.shape[1:]))
        self._sums[where] += x.unflatten(0, (groups, -1)).sum(1, dtype=torch.float64)
        if self._counts is not None:
            self._counts[where] += len(x) // groups
        self._entries += len(x)

    def _filled(self, sums: Tensor) -> Tensor:
        """How many entries each group has, [most, 1, ...]."""
        begin = torch.arange(len(sums), dtype=torch.float64, device=sums.device) * self.of
        return (self._entries - begin).clamp(0, self.of).view(-1, *[1] * (sums.dim() - 1))

    def _fit(self, x: Tensor) -> None:
        """Make room for entries of the shape of x, with fewer groups if need be."""
        shape, own = list(x.shape[1:]), self._sums
        if own is not None and own.shape[1:] != x.shape[1:]:
            shape = [max(sizes) for sizes in zip(shape, own.shape[1:], strict=True)]
            self._counts = self._filled(own).expand_as(own).clone() if self._counts is None else self._counts
        elif own is not None:
            shape = list(own.shape[1:])
        tensors = 1 if self._counts is None else 2
        while self._most > 1 and self._most * math.prod(shape) * 8 * tensors > self.room:
            self._most //= 2
        while self._groups > self._most:
            self._join()
        if own is None:
            self._sums = torch.zeros(self._most, *shape, dtype=torch.float64, device=x.device)
        elif own.shape != (self._most, *shape):
            self._sums = _extended(own[: self._most].clone(), [self._most, *shape])
            if self._counts is not None:
                self._counts = _extended(self._counts[: self._most].clone(), [self._most, *shape])

    def _join(self) -> None:
        """Join neighbours in pairs."""
        self.of *= 2
        for held in (self._sums, self._counts):
            if held is not None:
                joined = held[::2].clone()
                joined[: len(held) // 2] += held[1::2]
                held[: len(joined)] = joined
                held[len(joined) :] = 0


def _extended(x: Tensor, shape: list[int]) -> Tensor:
    """The tensor with zeros behind it on every axis, up to this shape."""
    missing = [size - own for size, own in zip(shape, x.shape, strict=True)]
    return functional.pad(x, [size for axis in reversed(missing) for size in (0, axis)]) if any(missing) else x
