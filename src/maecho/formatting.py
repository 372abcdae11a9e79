"""Writes sizes in bytes and Markdown tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def size(number: float) -> str:
    """A number of bytes with a unit, e.g. "1.8 MB"."""
    from rich.filesize import decimal

    return decimal(round(number))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. None makes an empty cell."""
    texts = [["" if cell is None else str(cell).replace("|", r"\|") for cell in row] for row in (heads, *rows)]
    lines = ["| " + " | ".join(cells) + " |" for cells in texts]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])
