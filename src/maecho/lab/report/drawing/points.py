"""Draws lines and scattered points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from maecho.lab.charts import Lines, Points, Scatter
from maecho.lab.report.drawing.axes import LEFT, RIGHT, TOP, Axes
from maecho.lab.report.drawing.drawn import Drawn, Entry, Look, colours, thinned
from maecho.lab.report.drawing.markup import Markup, element, join, number
from maecho.lab.report.drawing.scales import short

MOST_POINTS, MOST_MARKS, MOST_ROWS = 1000, 60, 120
"""Of one series: points of its line, points that answer to the mouse, rows in the table of numbers."""
MOST_DOTS = 25
"""A longer series shows its line alone. Its points still answer."""
LINE_HEIGHT = 11.0


def draw_lines(chart: Lines, look: Look) -> Drawn:
    """Every series as a line, every level as a dashed one across the picture."""
    points = [point for series in chart.series.values() for point in series]
    axes = Axes.over([x for x, _ in points], [*(y for _, y in points), *chart.levels.values()], chart.x, chart.y, look)
    hues = colours([*chart.series, *(name for name in chart.levels if name not in chart.series)])
    legend = [*(Entry(name, hues[name]) for name in chart.series), *(Entry(n, hues[n], True) for n in chart.levels)]
    groups = []
    for i, (name, level) in enumerate(chart.levels.items(), len(chart.series)):
        place, tip = axes.y(level), f"{name}: {short(level)}"
        line = element("line", class_="level", x1=LEFT, x2=look.width - RIGHT, y1=place, y2=place)
        mark = element("circle", class_="mark ghost", cx=look.width - RIGHT - 4, cy=place, r=4, data_tip=tip)
        groups.append(element("g", line, mark, class_=f"series c{hues[name]}", data_series=i))
    for i, (name, series) in enumerate(chart.series.items()):
        path = element(
            "path", class_="line", d=_path([(axes.x(x), axes.y(y)) for x, y in thinned(series, MOST_POINTS)])
        )
        kind = "mark" if len(series) <= MOST_DOTS else "mark ghost"
        marks = [
            element("circle", class_=kind, cx=axes.x(x), cy=axes.y(y), r=3, data_tip=_at(name, chart.x, x, y))
            for x, y in thinned(series, MOST_MARKS)
        ]
        groups.append(element("g", path, *marks, class_=f"series c{hues[name]}", data_series=i))
    rows = [
        *([name, short(x), short(y)] for name, series in chart.series.items() for x, y in thinned(series, MOST_ROWS)),
        *([name, "", short(level)] for name, level in chart.levels.items()),
    ]
    content = join(axes.frame, *groups)
    return Drawn(content, look.width, look.height, tuple(legend), ("series", chart.x, chart.y), rows)


def _at(name: str, label: str, x: float, y: float) -> str:
    return f"{name}, {label} {short(x)}: {short(y)}"


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(places))


def draw_scatter(chart: Scatter, look: Look) -> Drawn:
    """Every group in a colour and a shape of its own."""
    points = [point for group in chart.groups.values() for point in group]
    axes = Axes.over([x for x, _ in points], [y for _, y in points], chart.x, chart.y, look)
    hues = colours(chart.groups)
    names = _names(chart.groups, axes, look) if look.names else {}
    groups = []
    for i, (name, group) in enumerate(chart.groups.items()):
        marks = [
            element("path", class_="mark", d=_shape(hues[name], axes.x(x), axes.y(y)),
                    data_x=axes.x(x), data_y=axes.y(y), data_tip=f"{name}: {chart.x} {short(x)}, {chart.y} {short(y)}")
            for x, y in group
        ]  # fmt: skip
        groups.append(element("g", *marks, names.get(name), class_=f"series c{hues[name]}", data_series=i))
    rows = [[name, short(x), short(y)] for name, group in chart.groups.items() for x, y in group]
    legend = tuple(Entry(name, hue) for name, hue in hues.items())
    return Drawn(join(axes.frame, *groups), look.width, look.height, legend, ("group", chart.x, chart.y), rows)


def _shape(colour: int, x: float, y: float) -> str:
    """The outline of a mark around a place: neighbours in colour differ in shape."""
    outlines = (
        "m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
        "m-3.3 -3.3h6.6v6.6h-6.6z",
        "m0 -4.4l4.2 7.4h-8.4z",
        "m0 -4.6l4.6 4.6l-4.6 4.6l-4.6 -4.6z",
        "m0 4.4l4.2 -7.4h-8.4z",
    )
    return f"M{number(x)} {number(y)}{outlines[colour % len(outlines)]}"


def _names(groups: Mapping[str, Points], axes: Axes, look: Look) -> dict[str, Markup]:
    """The name of every group beside its first point, moved towards the middle until no two lie on each other."""
    wanted = {name: (axes.x(group[0][0]), axes.y(group[0][1])) for name, group in groups.items() if group}
    placed: list[tuple[float, float, float]] = []
    found = {}
    middle = look.height / 2
    # From both ends: the upper half moves down, the lower half up.
    for name, (x, y) in sorted(wanted.items(), key=lambda item: -abs(item[1][1] - middle)):
        step = LINE_HEIGHT if y < middle else -LINE_HEIGHT
        wide = 5.6 * len(name) + 8
        left = x + wide > look.width - RIGHT
        start = x - wide if left else x + 8
        height = max(y + 3.5, TOP)
        for begin, end, taken in sorted(placed, key=lambda one: one[2] * step):
            if begin < start + wide and start < end and abs(taken - height) < LINE_HEIGHT:
                height = taken + step
        placed.append((start, start + wide, height))
        tip = f"{number(x + (-6 if left else 6))} {number(height - 3.5)}"
        leader = element("path", class_="leader", d=f"M{number(x)} {number(y)}L{tip}")
        said = element("text", name, class_="name end" if left else "name", x=x - 8 if left else start, y=height)
        found[name] = join(leader if abs(height - 3.5 - y) > 3 else None, said)
    return found
