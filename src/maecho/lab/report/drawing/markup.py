"""Makes HTML and SVG from elements. Whatever is not markup is escaped, so no text from a file can become a tag."""

from __future__ import annotations

import html

from maecho.errors import printable

LEAVES = {"circle", "line", "path", "rect", "image"}
"""Elements of SVG that hold nothing. They close themselves."""
VOID = {"meta"}
"""Elements of HTML that have no end."""


class Markup(str):
    """A text that is markup already."""


def text(content: object) -> Markup:
    """Markup as it is; anything else as a text that a reader sees as it is."""
    return content if isinstance(content, Markup) else Markup(html.escape(printable(str(content))))


def join(*parts: object) -> Markup:
    """The parts one after the other. None is left out."""
    return Markup("".join(text(part) for part in parts if part is not None))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """One element.

    Args:
        tag: its name.
        children: markup or texts; None is left out.
        attributes: `class_` stands for class, and other underscores for hyphens. None and False leave one out, True
            gives one without a value.
    """
    said = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in LEAVES:
        return Markup(f"<{tag}{said}/>")
    return Markup(f"<{tag}{said}>" if tag in VOID else f"<{tag}{said}>{join(*children)}</{tag}>")


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    shown = "" if value is True else number(value) if isinstance(value, float) else value
    return f' {name.strip("_").replace("_", "-")}="{text(shown)}"'


def number(value: float) -> str:
    """A length or place with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"
