"""Sets of neurons and the values on whose axes they lie, while a network is run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from maecho.network.axes.along import Along, Call, Rule


@dataclass(eq=False)
class Neurons:
    """A set of neurons that are permuted together, or not at all."""

    size: int
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    """Name and axis of a weight -> how many neighbouring entries each neuron has there."""
    _fixed: bool = False
    _merged: Neurons | None = None

    def root(self) -> Neurons:
        """The set to which these neurons belong by now."""
        return self if self._merged is None else self._merged.root()

    @property
    def fixed(self) -> bool:
        """Whether they keep their order."""
        return self.root()._fixed

    def fix(self) -> None:
        self.root()._fixed = True

    def join(self, other: Neurons) -> None:
        """Join two sets of neurons into one, since their values are added or they use the same weight."""
        one, two = self.root(), other.root()
        if one is two:
            return
        one._fixed |= two._fixed or one.size != two.size
        one.places |= two.places
        two._merged = one


@dataclass(frozen=True, eq=False)
class Spot:
    """The neurons on one axis of a value. Each has a block of neighbouring entries."""

    neurons: Neurons
    block: int = 1


Axes = dict[int, Spot]
"""Axis of a value -> the neurons on it. Axes without neurons (examples, places, inputs of the network) are left out."""


def fix(values: Iterable[Axes]) -> Axes:
    """Fix all neurons of some values. What is made of them has no neurons."""
    for axes in values:
        for spot in axes.values():
            spot.neurons.fix()
    return {}


def carried(axes: Axes, rule: Rule, call: Call) -> Axes:
    """The neurons of one value after an operation with a rule."""
    found: Axes = {}
    for axis, spot in axes.items():
        after = rule(call, Along(axis, spot.neurons.root().size, spot.block))
        if after is None or after.axis in found:
            spot.neurons.fix()
        else:
            found[after.axis] = Spot(spot.neurons, after.block)
    return found


def joined(values: Iterable[tuple[Axes, Tensor]], out: Tensor, along: int | None = None) -> Axes:
    """Join the neurons of several values on the same axis. Values are broadcast to the shape of the result.

    On the axis `along` the values are laid end to end, which fixes the neurons there.
    """
    given = list(values)
    if any(value.dim() > out.dim() for _, value in given):
        return fix(axes for axes, _ in given)
    found: Axes = {}
    for axis, size in enumerate(out.shape):
        spots: list[Spot] = []
        together = axis != along
        for axes, value in given:
            own = axis - (out.dim() - value.dim())
            spot = axes.get(own)
            if spot is not None:
                spots.append(spot)
                together &= value.shape[own] == size
            elif own >= 0 and value.shape[own] != 1:
                together = False
        for spot in spots:
            spots[0].neurons.join(spot.neurons)
            if not together or spot.block != spots[0].block:
                spot.neurons.fix()
        if spots and together:
            found[axis] = spots[0]
    return found
