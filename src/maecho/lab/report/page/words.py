"""The words of a page: the little Markdown of configs and notes as HTML (paragraphs, lists, `code`, **bold**), and the
sentence about a stand-in."""

from __future__ import annotations

import re

from maecho.lab.report.drawing.markup import Markup, element, join, text

_PARTS = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\[([^\]]+)\]\([^)]*\)")


def paragraphs(source: str) -> Markup:
    """Paragraphs stand between empty lines; one whose lines all begin with a hyphen is a list."""
    found = []
    for block in re.split(r"\n\s*\n", source.strip()):
        if block.lstrip().startswith("- "):
            items = re.split(r"\n?- ", "\n" + block.strip())[1:]
            found.append(element("ul", *(element("li", line(item)) for item in items)))
        elif block:
            found.append(element("p", line(block)))
    return join(*found)


def line(source: str) -> Markup:
    """One paragraph. A link becomes its words, since it leads to a page that is not here."""
    source = " ".join(source.split())
    found: list[object] = []
    end = 0
    for match in _PARTS.finditer(source):
        code, bold, link = match.groups()
        found.append(text(source[end : match.start()]))
        found.append(element("code", code) if code else element("strong", line(bold)) if bold else line(link))
        end = match.end()
    return join(*found, text(source[end:]))


def stand_in(paper: str, here: str) -> Markup:
    """The sentence that stands wherever a number comes from something else than in the paper."""
    return element("p", element("strong", "Stand-in. "), f"In place of {paper}: {here}.", class_="stand-in")
