"""Errors of bad input: one printable line that says who, what was expected and what came."""

from __future__ import annotations

LONGEST = 500
"""Characters of a sentence. What is longer loses its middle, so that the end ("got …") is kept."""


class InputError(ValueError):
    """Input that cannot be used, in one sentence for the person who gave it."""

    def __init__(self, sentence: str):
        super().__init__(one_line(sentence))


class UploadError(InputError):
    """An upload or a file of maecho's that cannot be used, in one sentence for the person who sent it."""


def one_line(text: str, longest: int = LONGEST) -> str:
    """A text that a terminal and a log can show: on one line, printable, short."""
    text = shorten(text, 2 * longest)  # first, since what came may be megabytes long
    return shorten(printable(" ".join(part.strip() for part in text.splitlines())), longest)


def printable(text: str) -> str:
    """The text with escapes in the place of control characters, of marks that turn the direction of writing and of
    halves of surrogate pairs."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shorten(text: str, longest: int) -> str:
    """At most `longest` characters, taken from both ends."""
    if len(text) <= longest:
        return text
    gap = " … "
    end = (longest - len(gap)) // 2
    return text[: longest - len(gap) - end] + gap + text[len(text) - end :]
