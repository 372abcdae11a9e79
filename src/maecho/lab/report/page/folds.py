"""Parts that are a click away. Their markup waits as a text until then, so that a large page opens at once."""

from __future__ import annotations

from maecho.lab.report.drawing.markup import Markup, element, join


def fold(summary: str, *content: object, id: str | None = None) -> Markup:  # noqa: A002
    """A line that unfolds to the content when it is asked for.

    The content has no `</script`: texts from files are escaped, and no element of ours is a script.
    """
    waiting = element("script", join(*content), type="text/html")
    return element("details", element("summary", summary), waiting, class_="run", id=id)
