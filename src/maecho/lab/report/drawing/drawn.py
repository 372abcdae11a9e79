"""What a drawing function gives back, and how the pictures look in general: sizes, colours, shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from maecho.lab.report.drawing.markup import Markup
from maecho.lab.report.drawing.scales import Kind

T = TypeVar("T")

COLOURS = 12
"""The classes c0 to c11 of page.css and figure.css."""
FAMILIES = (
    ("ma-echo",), ("echo-chain",), ("echo-relay",), ("regmean",), ("ensemble",), ("average", "fedavg"), ("ot",),
    ("pooled",), ("local",),
)  # fmt: skip
"""Columns whose names begin so have the colour of that number in every picture."""


@dataclass(frozen=True)
class Look:
    """How a chart is drawn, as far as its data do not say so."""

    x: Kind = "linear"
    y: Kind = "linear"
    diagonal: bool = False
    """Whether a line shows where x equals y."""
    names: bool = False
    """Whether every group is named beside its first point."""
    width: float = 460
    height: float = 310


class Entry(NamedTuple):
    """One line of a legend."""

    name: str
    colour: int
    level: bool = False


@dataclass(frozen=True)
class Drawn:
    """The inside of an <svg>, and what stands beside it on a page."""

    content: Markup
    width: float
    height: float
    legend: tuple[Entry, ...]
    heads: tuple[str, ...]
    """Of the table of numbers behind the picture."""
    rows: Sequence[Sequence[object]]


def colours(names: Iterable[str]) -> dict[str, int]:
    """A colour for every name. Known columns have their own; others take what is left, in order."""
    names = list(names)
    found: dict[str, int] = {}
    for fits in (str.__eq__, str.startswith):  # a column's own name comes before those of its variants
        for name in names:
            number = next((i for i, family in enumerate(FAMILIES) if any(fits(name, one) for one in family)), None)
            if number is not None and name not in found and number not in found.values():
                found[name] = number
    free = [number for number in range(COLOURS) if number not in found.values()] or list(range(COLOURS))
    rest = [name for name in names if name not in found]
    found |= {name: free[i % len(free)] for i, name in enumerate(rest)}
    return {name: found[name] for name in names}


def thinned(points: Sequence[T], most: int) -> list[T]:
    """At most so many of the points, evenly, the last one among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
