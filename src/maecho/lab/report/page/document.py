"""Puts a page together: one HTML file with its style and its script inside, which fetches nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from maecho._version import __version__
from maecho.lab.report.drawing.figures import style
from maecho.lab.report.drawing.markup import Markup, element, join

Link = tuple[str, str]
"""The id of a section, and its words."""


def document(title: str, lead: Markup, links: Sequence[Link], sections: Sequence[Markup], maker: str) -> str:
    """The whole file.

    Args:
        title: of the page.
        lead: what stands below the title.
        links: what the contents lead to.
        sections: the body.
        maker: which command made it; a later one recognises the file by it.
    """
    script = Markup(_file("page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=f"{maker}, maecho {__version__}"),
        element("title", title),
        element("style", Markup(style() + _file("page.css"))),
    )
    body = element(
        "body",
        element("a", "Skip to the results", href="#main", class_="skip"),
        element(
            "header",
            element("h1", title),
            element("button", "Dark", type="button", id="theme", aria_pressed="false", hidden=True),
            lead,
        ),
        element("nav", element("ol", *(_link(*link) for link in links)), aria_label="Contents"),
        element("main", *sections, id="main", tabindex="-1"),
        element("footer", element("p", f"Made by {maker}, maecho {__version__}. Nothing on this page is fetched.")),
        element("div", id="tip", role="status", aria_live="polite"),
        element("script", script),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _link(place: str, words: str) -> Markup:
    return element("li", element("a", words, href=f"#{place}"))


def _file(name: str) -> str:
    return (files("maecho.lab.report.page") / name).read_text(encoding="utf-8")


def maker_of(text: str) -> str | None:
    """The command that made a page, by the beginning of its text; None if no command of ours did."""
    _, found, rest = text.partition('<meta name="generator" content="')
    return rest.partition(", maecho ")[0] if found else None


def note(content: object) -> Markup:
    """A paragraph below the title."""
    return join(element("p", content, class_="lead"))
