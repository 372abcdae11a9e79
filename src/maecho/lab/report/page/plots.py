"""A chart on a page: the picture, its legend of buttons, and the table of its numbers."""

from __future__ import annotations

from maecho.lab.charts import Bubbles, Chart
from maecho.lab.report.drawing.drawn import Look
from maecho.lab.report.drawing.figures import draw
from maecho.lab.report.drawing.markup import Markup, element, join
from maecho.lab.report.page.tables import plain

WIDE = 500
"""A wider picture gets more room."""
KEYS = "Left and right arrows go through its points."


def plot(chart: Chart, look: Look | None = None) -> Markup:
    """The chart as a figure that answers to mouse and keyboard."""
    drawn = draw(chart, look)
    wide = Markup(f"0 0 {drawn.width:g} {drawn.height:g}")
    picture = element(
        "svg", drawn.content, class_="chart", viewBox=wide, width=drawn.width, height=drawn.height, role="img",
        aria_label=f"{chart.title}. {KEYS}", tabindex="0",
    )  # fmt: skip
    size = " bubbles" if isinstance(chart, Bubbles) else " wide" if drawn.width > WIDE else ""
    legend = element("ul", *(_entry(i, *entry) for i, entry in enumerate(drawn.legend)), class_="legend")
    numbers = element(
        "details", element("summary", "Numbers"), plain(f"The numbers of: {chart.title}", drawn.heads, drawn.rows),
        class_="numbers",
    )  # fmt: skip
    return element(
        "figure",
        element("figcaption", chart.title),
        element("div", picture, class_="canvas"),
        legend if len(drawn.legend) > 1 else None,
        numbers,
        class_=f"plot{size}",
    )


def _entry(i: int, name: str, colour: int, level: bool) -> Markup:
    sample = element("span", class_=f"sample{' level' if level else ''} c{colour}", aria_hidden="true")
    button = element("button", join(sample, name), type="button", aria_pressed="true", data_series=i)
    return element("li", button)


def plots(*charts: Markup) -> Markup | None:
    """Pictures side by side, as many as fit."""
    return element("div", *charts, class_="plots") if charts else None
