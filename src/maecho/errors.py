"""Errors for bad input. Each is one printable line that says who, what was expected and what came."""

from __future__ import annotations

LONGEST = 500
"""The most characters of a sentence. A longer one loses its middle, so that its end ("got …") is kept."""


class InputError(ValueError):
    """Input that cannot be used, in one sentence for the person who gave it."""

    def __init__(self, sentence: str):
        super().__init__(one_line(sentence))


class UploadError(InputError):
    """An upload that cannot be used, in one sentence for the person who sent it."""


def one_line(text: str, longest: int = LONGEST) -> str:
    """Make a text fit for a terminal and a log: on one line, printable and short."""
    text = shorten(text, 2 * longest)  # first, since the text may be megabytes long
    return shorten(printable(" ".join(part.strip() for part in text.splitlines())), longest)


def text_of(error: Exception) -> str:
    """What an error of another library says, on one line."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """Replace control characters, marks that change the direction of writing, and halves of surrogate pairs by
    escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shorten(text: str, longest: int) -> str:
    """Cut the middle out of a text that has more than `longest` characters."""
    if len(text) <= longest:
        return text
    gap = " … "
    end = (longest - len(gap)) // 2
    return text[: longest - len(gap) - end] + gap + text[len(text) - end :]
