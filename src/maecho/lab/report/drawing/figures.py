"""Draws any chart: the inside of an <svg> for a page, or an SVG file that stands alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from maecho.lab.charts import Bubbles, Chart, Lines, Pictures, Scatter, Surface
from maecho.lab.report.drawing.drawn import Drawn, Look
from maecho.lab.report.drawing.grids import draw_bubbles, draw_pictures, draw_surface
from maecho.lab.report.drawing.markup import Markup, element, join
from maecho.lab.report.drawing.points import draw_lines, draw_scatter

DRAWINGS: dict[type[Chart], Callable[[Any, Look], Drawn]] = {
    Lines: draw_lines,
    Scatter: draw_scatter,
    Bubbles: draw_bubbles,
    Surface: draw_surface,
    Pictures: draw_pictures,
}
"""What draws each kind of chart."""
TITLE, LEGEND_LINE = 26, 17
"""Heights in a file of its own: of the title, and of one line of the legend."""


def draw(chart: Chart, look: Look | None = None) -> Drawn:
    """Draw a chart."""
    return DRAWINGS[type(chart)](chart, look or Look())


def style() -> str:
    """The rules of CSS that every picture needs, on a page or alone."""
    return (files("maecho.lab.report.drawing") / "figure.css").read_text(encoding="utf-8")


def svg_file(chart: Chart, look: Look | None = None) -> str:
    """A file for a paper: in light colours, with its title and its legend."""
    drawn = draw(chart, look)
    shown = drawn.legend if look is None or not look.names else ()
    lines = _legend(shown, drawn.width)
    height = TITLE + drawn.height + LEGEND_LINE * (max((line for _, line, _ in lines), default=-1) + 1) + 4
    entries = []
    for x, line, entry in lines:
        middle = TITLE + drawn.height + LEGEND_LINE * line + 8
        sample = element("line", class_="level" if entry.level else "line", x1=x, x2=x + 16, y1=middle, y2=middle)
        said = element("text", entry.name, class_="legend", x=x + 21, y=middle + 4)
        entries.append(element("g", sample, said, class_=f"series c{entry.colour}"))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + element(
        "svg",
        element("title", chart.title),
        element("style", Markup(style())),
        element("rect", class_="paper", width=drawn.width, height=height),
        element("text", chart.title, class_="title", x=4, y=17),
        element("g", drawn.content, transform=f"translate(0 {TITLE})"),
        *entries,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=join(f"0 0 {drawn.width:g} {height:g}"),
        width=drawn.width,
        height=height,
        role="img",
        class_="chart",
    )


def _legend(entries: Any, width: float) -> list[tuple[float, int, Any]]:
    """Where every entry of a legend stands: x, and the number of its line."""
    places, x, line = [], 8.0, 0
    for entry in entries:
        wide = 34 + 6.1 * len(entry.name)
        if x > 8 and x + wide > width:
            x, line = 8.0, line + 1
        places.append((x, line, entry))
        x += wide
    return places
