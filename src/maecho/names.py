"""Names that people read: short and printable by rule, checked where they come in."""

from __future__ import annotations

from maecho.errors import UploadError, shorten

CLIENT = 100
"""Characters of a client's name."""
PART = 200
"""Characters of the name of a layer or a weight."""


def check(what: str, name: object, longest: int = PART, *, empty: bool = False) -> None:
    """`what` begins the sentence: "a client". A model that is one layer has a layer without a name: `empty`."""
    if not isinstance(name, str) or not (name.strip() or (empty and name == "")):
        raise UploadError(f"{what} must have a name, got {_shown(name)}")
    if len(name) > longest or not name.isprintable():
        raise UploadError(
            f"{what} must have a name of at most {longest} printable characters, got {len(name)} characters: "
            f"{_shown(name)}"
        )


def _shown(name: object) -> str:
    return ascii(shorten(name, 60)) if isinstance(name, str) else type(name).__name__
