"""The frame of a picture with two axes: grid, ticks and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maecho.lab.report.drawing.drawn import Look
from maecho.lab.report.drawing.markup import Markup, element, join
from maecho.lab.report.drawing.scales import Scale, short

LEFT, RIGHT, TOP, BOTTOM = 44, 12, 30, 44


@dataclass(frozen=True)
class Axes:
    """Two scales and the frame around them."""

    x: Scale
    y: Scale
    frame: Markup

    @classmethod
    def over(cls, xs: Sequence[float], ys: Sequence[float], x: str, y: str, look: Look) -> Axes:
        """Axes that show all these points, with these labels."""
        if look.diagonal:
            xs = ys = [*xs, *ys]
        across = Scale.over(xs, LEFT, look.width - RIGHT, look.x)
        up = Scale.over(ys, look.height - BOTTOM, TOP, look.y)
        return cls(across, up, _frame(across, up, x, y, look))


def _frame(across: Scale, up: Scale, x: str, y: str, look: Look) -> Markup:
    floor, right = look.height - BOTTOM, look.width - RIGHT
    parts = []
    for tick in up.ticks():
        place = up(tick)
        parts.append(element("line", class_="grid", x1=LEFT, x2=right, y1=place, y2=place))
        parts.append(element("text", short(tick), class_="tick end", x=LEFT - 6, y=place + 4))
    for tick in across.ticks():
        place = across(tick)
        parts.append(element("line", class_="grid", x1=place, x2=place, y1=TOP, y2=floor))
        parts.append(element("text", short(tick), class_="tick middle", x=place, y=floor + 16))
    if look.diagonal:
        ends = (up.low, up.high)
        parts.append(
            element("line", class_="diagonal", x1=across(ends[0]), y1=up(ends[0]), x2=across(ends[1]), y2=up(ends[1]))
        )
    parts.append(element("line", class_="axis", x1=LEFT, x2=right, y1=floor, y2=floor))
    parts.append(element("text", x, class_="label middle", x=(LEFT + right) / 2, y=look.height - 8))
    parts.append(element("text", y, class_="label", x=4, y=14))
    return join(*parts)
