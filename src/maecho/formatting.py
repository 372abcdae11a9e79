"""Writes sizes in bytes, numbers of tensors and Markdown tables as text, and reads sizes back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from maecho.errors import printable

if TYPE_CHECKING:
    from torch import Tensor

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kKMGT]?)[bB]?\s*")


def size(number: float) -> str:
    """A number of bytes with a unit, e.g. "1.8 MB"."""
    from rich.filesize import decimal

    return decimal(round(number))


def bytes_of(text: str) -> float | None:
    """The inverse of `size`, for what people write: "300000", "64 MB", "1.5 GB". None if it is no size."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    factor: int = 1000 ** " KMGT".index(found[2].upper() or " ")
    return factor * (float(found[1]) if "." in found[1] else int(found[1]))


def numbers(tensor: Tensor) -> str:
    """The numbers of a tensor, for the end of an error message. Of more than 20 numbers only their kind and shape are
    told: a list takes ten times the memory of its tensor."""
    if tensor.numel() > 20:
        return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    return str(tensor.tolist())


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. None makes an empty cell. What is not printable is escaped, so a cell is always one line."""
    texts = [
        ["" if cell is None else printable(str(cell)).replace("|", r"\|") for cell in row] for row in (heads, *rows)
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in texts]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])
