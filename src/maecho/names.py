"""Checks the names of clients, layers and weights: they must be short and printable, since people read them."""

from __future__ import annotations

from maecho.errors import InputError, shorten

CLIENT = 100
"""The most characters of a client's name."""
PART = 200
"""The most characters of the name of a layer or a weight."""


def check(
    what: str, name: object, longest: int = PART, *, empty: bool = False, error: type[InputError] = InputError
) -> None:
    """Raise an error unless the name is a short and printable text.

    Args:
        what: begins the sentence of the error, e.g. "a client".
        empty: whether the empty name is allowed. A model that is a single layer has a layer of that name.
        error: the kind of error, which is UploadError if the name stands in an upload.
    """
    if not isinstance(name, str) or not (name.strip() or (empty and name == "")):
        raise error(f"{what} must have a name, got {_shown(name)}")
    if len(name) > longest or not name.isprintable():
        raise error(
            f"{what} must have a name of at most {longest} printable characters, got {len(name)} characters: "
            f"{_shown(name)}"
        )


def _shown(name: object) -> str:
    return ascii(shorten(name, 60)) if isinstance(name, str) else type(name).__name__
