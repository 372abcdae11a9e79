"""Draws what stands on a grid: bubbles for counts, a surface in colours, small pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from maecho.lab.charts import Bubbles, Pictures, Surface
from maecho.lab.report.drawing.axes import Axes
from maecho.lab.report.drawing.drawn import Drawn, Look, thinned
from maecho.lab.report.drawing.markup import element, join, number
from maecho.lab.report.drawing.png import data_uri
from maecho.lab.report.drawing.scales import Scale, short

LEFT, TOP = 44, 30
RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""From low to high: dark violet, blue, teal, green, yellow. Their brightness rises evenly."""
MOST_LINES = 21
"""Rows and columns of the table behind a surface."""


def draw_bubbles(chart: Bubbles, look: Look) -> Drawn:
    """A disc for every count that is not 0; its area is the count."""
    rows, columns = len(chart.counts), max((len(row) for row in chart.counts), default=0)
    step = min(max(min((look.width - LEFT - 12) / max(columns, 1), 420 / max(rows, 1)), 6), 28)
    most = max((count for row in chart.counts for count in row), default=0)
    width, height = LEFT + step * columns + 12, TOP + step * rows + 38
    parts = [element("text", chart.y, class_="label", x=4, y=14)]
    parts.append(element("text", chart.x, class_="label middle", x=LEFT + step * columns / 2, y=height - 6))
    parts += [
        element("text", k, class_="tick end", x=LEFT - 6, y=TOP + step * (k + 0.5) + 4)
        for k in range(0, rows, max(1, math.ceil(15 / step)))
    ]
    parts += [
        element("text", k, class_="tick middle", x=LEFT + step * (k + 0.5), y=TOP + step * rows + 15)
        for k in range(0, columns, max(1, math.ceil(20 / step)))
    ]
    parts.append(element("rect", class_="field", x=LEFT, y=TOP, width=step * columns, height=step * rows))
    discs = []
    for i, row in enumerate(chart.counts):
        for k, count in enumerate(row):
            if count:
                tip = f"{chart.y} {i}, {chart.x} {k}: {count:,}"
                radius = max(0.48 * step * math.sqrt(count / most), 0.8)
                place = {"cx": LEFT + step * (k + 0.5), "cy": TOP + step * (i + 0.5), "r": radius}
                discs.append(element("circle", class_="mark", data_tip=tip, **place))
    parts.append(element("g", *discs, class_="series c1", data_series=0))
    heads = (f"{chart.y} \\ {chart.x}", *map(str, range(columns)))
    table = [[i, *row] for i, row in enumerate(chart.counts)]
    return Drawn(join(*parts), width, height, (), heads, table)


def draw_surface(chart: Surface, look: Look) -> Drawn:
    """Heights as colours, the path as a line of dots, and named points."""
    axes = Axes.over(_edges(chart.xs), _edges(chart.ys), chart.x, chart.y, look)
    heights = [value for row in chart.values for value in row]
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    colour = Scale.over([low, high], 0, 1, "log" if low > 0 and high / low > 20 else "linear")
    tiles = []
    for (bottom, top), y, row in zip(_sides(chart.ys), chart.ys, chart.values, strict=True):
        for (left, right), x, value in zip(_sides(chart.xs), chart.xs, row, strict=True):
            corner = {"x": axes.x(left), "y": axes.y(top), "width": axes.x(right) - axes.x(left) + 0.4}
            tip = f"{chart.x} {short(x)}, {chart.y} {short(y)}: {short(value)}"
            tiles.append(
                element("rect", class_="tile mark", fill=_ramp(colour(value)), data_tip=tip,
                        height=axes.y(bottom) - axes.y(top) + 0.4, **corner)
            )  # fmt: skip
    walk = [(axes.x(x), axes.y(y)) for x, y in chart.path]
    said = "".join(f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(walk))
    route = [element("path", class_="route", d=said)] if walk else []
    route += [element("circle", class_="stop", cx=x, cy=y, r=2.2) for x, y in walk]
    for name, (x, y) in chart.points.items():
        route.append(element("circle", class_="pin", cx=axes.x(x), cy=axes.y(y), r=4.5))
        route.append(element("text", name, class_="pinned", x=axes.x(x) + 7, y=axes.y(y) - 6))
    bar = _bar(low, high, look.width, look.height)
    content = join(axes.frame, element("g", *tiles, class_="series", data_series=0), element("g", *route), bar)
    columns = thinned(range(len(chart.xs)), MOST_LINES)
    rows = [
        [short(chart.ys[i]), *(short(chart.values[i][k]) for k in columns)]
        for i in thinned(range(len(chart.ys)), MOST_LINES)
    ]
    heads = (f"{chart.y} \\ {chart.x}", *(short(chart.xs[k]) for k in columns))
    return Drawn(content, look.width, look.height + 34, (), heads, rows)


def _bar(low: float, high: float, width: float, top: float) -> object:
    """What the colours mean."""
    steps = [element("rect", x=150 + 8.0 * k, y=top + 6, width=8.4, height=10, fill=_ramp(k / 19)) for k in range(20)]
    ends = [
        element("text", short(low), class_="tick end", x=144, y=top + 15),
        element("text", short(high), class_="tick", x=318, y=top + 15),
    ]
    return element("g", *steps, *ends)


def _sides(places: Sequence[float]) -> list[tuple[float, float]]:
    """Where the tile of every place begins and ends: halfway to its neighbours."""
    edges = _edges(places)
    return list(pairwise(edges))


def _edges(places: Sequence[float]) -> list[float]:
    if len(places) < 2:
        return [places[0] - 0.5, places[0] + 0.5] if places else []
    middles = [(a + b) / 2 for a, b in pairwise(places)]
    return [2 * places[0] - middles[0], *middles, 2 * places[-1] - middles[-1]]


def _ramp(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    k = min(int(place), len(RAMP) - 2)
    mixed = [round(a + (place - k) * (b - a)) for a, b in zip(RAMP[k], RAMP[k + 1], strict=True)]
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"


def draw_pictures(chart: Pictures, look: Look) -> Drawn:
    """Every image as pixels, each row with its name before it."""
    left = 12 + 6.4 * max((len(name) for name in chart.rows), default=0)
    side = min(max((look.width + 160 - left) / max(len(chart.columns), 1), 24), 72)
    parts, table = [], []
    for k, column in enumerate(chart.columns):
        parts.append(element("text", column, class_="tick middle", x=left + side * (k + 0.5), y=TOP - 8))
    for i, (name, images) in enumerate(chart.rows.items()):
        top = TOP + side * i
        parts.append(element("text", name, class_="name end", x=left - 8, y=top + side / 2 + 4))
        for k, (column, image) in enumerate(zip(chart.columns, images, strict=True)):
            pixels = [value for row in image for value in row]
            grey = sum(pixels) / max(len(pixels), 1)
            place = {"x": left + side * k + 1, "y": top + 1, "width": side - 2, "height": side - 2}
            parts.append(
                element("image", class_="mark", href=data_uri(image), data_tip=f"{name}, {column}",
                        preserveAspectRatio="none", **place)
            )  # fmt: skip
            table.append([name, column, f"{len(image)} x {len(image[0]) if image else 0}", f"{grey:.0f}"])
    content = element("g", *parts, class_="series", data_series=0)
    width, height = left + side * len(chart.columns) + 8, TOP + side * len(chart.rows) + 8
    return Drawn(content, width, height, (), ("row", "column", "pixels", "mean grey, 0 to 255"), table)
