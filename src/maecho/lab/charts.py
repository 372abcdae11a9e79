"""Charts as data: what a picture shows, without a word of how it is drawn.

A study puts charts into its results, as JSON. A report reads them and draws them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maecho import schema
from maecho.errors import InputError

Points = list[list[float]]
"""Pairs [x, y]."""
Image = list[list[int]]
"""Rows of grey values from 0, black, to 255, white."""


@dataclass(frozen=True)
class Lines:
    """Curves, and levels that are the same everywhere."""

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    """Name -> the curve's points, from left to right."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Name -> the height of a horizontal line."""

    def __post_init__(self) -> None:
        for name, points in self.series.items():
            _check_points(f"series {name!r}", points)
        for name, level in self.levels.items():
            _check_numbers(f"levels {name!r}", [level])


@dataclass(frozen=True)
class Scatter:
    """Points in groups."""

    title: str
    x: str
    y: str
    groups: Mapping[str, Points]

    def __post_init__(self) -> None:
        for name, points in self.groups.items():
            _check_points(f"groups {name!r}", points)


@dataclass(frozen=True)
class Bubbles:
    """A table of counts, each shown as a disc of that area."""

    title: str
    x: str
    """What the columns are."""
    y: str
    """What the rows are."""
    counts: list[list[int]]

    def __post_init__(self) -> None:
        _check_table("counts", self.counts)
        if any(count < 0 for row in self.counts for count in row):
            raise InputError("counts must be at least 0, got a negative one")


@dataclass(frozen=True)
class Surface:
    """Heights on a grid, a path on it, and points with names."""

    title: str
    x: str
    y: str
    xs: list[float]
    ys: list[float]
    values: list[list[float]]
    """`values[i][k]` is the height at `xs[k]`, `ys[i]`."""
    path: Points
    points: Mapping[str, list[float]]

    def __post_init__(self) -> None:
        _check_numbers("xs", self.xs)
        _check_numbers("ys", self.ys)
        _check_table("values", self.values)
        _check_points("path", self.path)
        for name, point in self.points.items():
            _check_points(f"points {name!r}", [point])
        for row in self.values:
            _check_numbers("values", row)
        shape = (len(self.values), len(self.values[0]) if self.values else 0)
        if shape != (len(self.ys), len(self.xs)):
            raise InputError(
                f"values must be {len(self.ys)} rows of {len(self.xs)} numbers, got {shape[0]} of {shape[1]}"
            )


@dataclass(frozen=True)
class Pictures:
    """Small images in rows."""

    title: str
    columns: list[str]
    """What stands above each column."""
    rows: Mapping[str, list[Image]]
    """What stands beside each row -> its images."""

    def __post_init__(self) -> None:
        for name, images in self.rows.items():
            if len(images) != len(self.columns):
                raise InputError(f"rows {name!r} must have {len(self.columns)} images, got {len(images)}")
            for image in images:
                _check_table(f"rows {name!r}", image)
                if any(not 0 <= value <= 255 for row in image for value in row):
                    raise InputError(f"rows {name!r} must have grey values from 0 to 255, got another")


Chart = Lines | Scatter | Bubbles | Surface | Pictures
KINDS: Mapping[str, type[Chart]] = {
    "lines": Lines,
    "scatter": Scatter,
    "bubbles": Bubbles,
    "surface": Surface,
    "pictures": Pictures,
}
"""The word that a file has for each kind of chart."""


def write(chart: Chart) -> dict[str, Any]:
    """The chart as plain values. `kind` says which it is."""
    kind = next(word for word, one in KINDS.items() if type(chart) is one)
    return {"kind": kind, **dataclasses.asdict(chart)}


def read(content: Any) -> Chart:
    """The chart that `write` has made plain. What is no chart raises InputError."""
    if not isinstance(content, Mapping):
        raise InputError(f"a chart must be a table with a kind, got {type(content).__name__}")
    word = content.get("kind")
    if not isinstance(word, str) or word not in KINDS:
        raise InputError(f"a chart must be of the kind {', '.join(KINDS)}, got {word!r}")
    kind, given = KINDS[word], {key: value for key, value in content.items() if key != "kind"}
    unknown = sorted(given.keys() - {one.name for one in dataclasses.fields(kind)})
    if unknown:
        raise InputError(f"a chart of the kind {word} must have no {unknown[0]!r}, got one")
    try:
        return schema.convert(given, kind)
    except ValueError as error:
        raise InputError(f"a chart of the kind {word} must be whole, got: {error}") from error


def _check_points(where: str, points: Iterable[list[float]]) -> None:
    for point in points:
        if len(point) != 2:
            raise InputError(f"{where} must be pairs of x and y, got {len(point)} numbers")
        _check_numbers(where, point)


def _check_numbers(where: str, numbers: Iterable[float]) -> None:
    for number in numbers:
        if not math.isfinite(number):
            raise InputError(f"{where} must be finite, got {number}")


def _check_table(where: str, table: list[list[Any]]) -> None:
    if len({len(row) for row in table}) > 1:
        raise InputError(f"{where} must have rows of one length, got several")
