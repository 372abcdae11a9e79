"""Rules for one set of neurons and one operation: on which axis of the result they lie, if the result still has them.

Each rule gets the operation, with the values of a real run, and says where the neurons went. None means that the
neurons can no longer be permuted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Along:
    """Neurons along one axis of a value. Each has a block of neighbouring entries there."""

    axis: int
    count: int
    block: int = 1


@dataclass(frozen=True)
class Call:
    """An operation on a value x, as it was run."""

    x: Tensor
    out: Any
    function: Callable[..., Any]
    """The operation, as a function of x and the arguments."""
    args: Sequence[Any] = ()
    """The arguments after x."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def argument(self, position: int, *names: str) -> Any:
        """An argument by its position after x, or by one of its names. None if it was not given."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)


Rule = Callable[[Call, Along], "Along | None"]


def reshaped(call: Call, along: Along) -> Along | None:
    """The entries keep their order (flatten, view, squeeze).

    The neurons go to the axis that has as many entries before it, and are blocks there.
    """
    if call.out.numel() != call.x.numel() or call.out.dtype != call.x.dtype:
        return None
    before = math.prod(call.x.shape[: along.axis])
    for axis, size in enumerate(call.out.shape):
        if math.prod(call.out.shape[:axis]) == before and size and size % along.count == 0:
            return Along(axis, along.count, size // along.count)
    return None


def permuted(call: Call, along: Along) -> Along | None:
    """The axes change places. Where one went is seen on a tensor whose axes all have different sizes."""
    probe = torch.empty(tuple(range(2, 2 + call.x.dim())), device="meta")
    shape = tuple(call.function(probe, *call.args, **call.kwargs).shape)
    return Along(shape.index(2 + along.axis), along.count, along.block)


def reduced(call: Call, along: Along) -> Along | None:
    """Some axes become one number each (mean, sum). Neurons on them are mixed."""
    given = call.argument(0, "dim", "axis")
    if given is None or not isinstance(call.out, Tensor):
        return None
    axes = {axis % call.x.dim() for axis in (given if isinstance(given, Iterable) else [given])}
    left = [size for axis, size in enumerate(call.x.shape) if axis not in axes]
    kept = [1 if axis in axes else size for axis, size in enumerate(call.x.shape)]
    if along.axis in axes or list(call.out.shape) not in (left, kept):
        return None
    gone = 0 if call.out.dim() == call.x.dim() else sum(axis < along.axis for axis in axes)
    return Along(along.axis - gone, along.count, along.block)


def before_last(axes: int) -> Rule:
    """The operation mixes the last axes, each by itself (pooling). Neurons on earlier axes stay."""

    def rule(call: Call, along: Along) -> Along | None:
        stay = isinstance(call.out, Tensor) and call.out.dim() == call.x.dim() and along.axis < call.x.dim() - axes
        return along if stay else None

    return rule


def padded(call: Call, along: Along) -> Along | None:
    """The last axes get longer or shorter, two numbers each."""
    return before_last(len(call.argument(0, "pad")) // 2)(call, along)


def resized(call: Call, along: Along) -> Along | None:
    """All axes from the third on are resized (interpolation)."""
    return before_last(call.x.dim() - 2)(call, along)


def indexed(call: Call, along: Along) -> Along | None:
    """x[...]. Neurons stay if their own axis is taken whole."""
    (given,) = call.args
    index = list(given) if isinstance(given, tuple) else [given]
    if any(not (one is None or one is ... or isinstance(one, int | slice)) or isinstance(one, bool) for one in index):
        return None
    if ... not in index:
        index.append(...)
    rest = call.x.dim() - sum(one is not None and one is not ... for one in index)
    at = index.index(...)
    whole = slice(None)
    axis = to = 0
    for one in [*index[:at], *[whole] * rest, *index[at + 1 :]]:
        if one is None:
            to += 1
            continue
        if axis == along.axis:
            taken = isinstance(one, slice) and range(*one.indices(call.x.shape[axis])) == range(call.x.shape[axis])
            return Along(to, along.count, along.block) if taken else None
        axis, to = axis + 1, to + isinstance(one, slice)
    return None
