"""Writes sizes in bytes, numbers of tensors and Markdown tables as text, and reads sizes back."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from maecho.errors import printable

if TYPE_CHECKING:
    from torch import Tensor

WIDTH, NAME = 80, 34
"""The columns of a terminal, and the longest name that stands beside its facts."""
UNITS = "kMGTPE"
FOLDED = 3
"""So many names that differ in one number alone are shown as one."""
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kKMGT]?)[bB]?\s*")


def size(number: float) -> str:
    """A number of bytes with a unit, e.g. "1.8 MB"."""
    number = round(number)
    if abs(number) < 1000:
        return f"{number} byte{'s' if number != 1 else ''}"
    power = min(len(UNITS), (len(str(abs(number))) - 1) // 3)
    return f"{number / 1000**power:,.1f} {UNITS[power - 1]}B"


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


_Group = tuple[tuple[str, ...], Hashable, list[int]]
"""The parts of a name, its facts, and the places of its members."""


def folded(names: Iterable[tuple[str, Hashable]]) -> dict[str, list[int]]:
    """Names that differ in one number alone, as those of equal blocks, as one: "layer.0-11.weight".

    Takes names with facts about each, and gives for each folded name the places of its members. Only names with equal
    facts are folded, and only three or more whose numbers follow each other.
    """
    groups = [(tuple(re.split(r"([./])", name)), facts, [at]) for at, (name, facts) in enumerate(names)]
    for part in range(max((len(name) for name, _, _ in groups), default=0), -1, -1):
        alike: dict[Hashable, list[_Group]] = {}
        for group in groups:
            name, facts, _ = group
            number = part < len(name) and name[part].isdecimal()
            alike.setdefault(((*name[:part], None, *name[part + 1 :]) if number else name, facts), []).append(group)
        groups = [one for found in alike.values() for one in _runs(found, part)]
    return {"".join(name): members for name, _, members in sorted(groups, key=lambda group: group[2][0])}


def names_of(names: Iterable[str]) -> str:
    """Names on one line. Those of equal blocks are folded."""
    return ", ".join(folded((name, ()) for name in names))


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Rows in columns of equal width. A long name in the first column stands on a line of its own, and the last column
    is broken where a line is full."""
    right = set(right)
    widths = [max(len(row[k]) for row in rows if k or len(row[0]) <= NAME) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = row[0]
        if len(first) > NAME:
            lines.append(first)
            first = ""
        given = (first, *row[1:])
        cells = [c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(given, widths, strict=True))]
        head = "  ".join(cells[:-1]) + "  "
        last = textwrap.wrap(cells[-1].rstrip(), max(20, WIDTH - len(head)), break_on_hyphens=False) or [""]
        lines += [(head + (cells[-1] if len(last) == 1 else last[0])).rstrip()]
        lines += [" " * len(head) + line for line in last[1:]]
    return "\n".join(lines)


def _runs(groups: list[_Group], part: int) -> list[_Group]:
    """Names that differ in one part: those whose numbers there follow each other are one."""
    if len(groups) < FOLDED or part >= len(groups[0][0]) or not groups[0][0][part].isdecimal():
        return groups
    groups = sorted(groups, key=lambda group: int(group[0][part]))
    out, run = [], groups[:1]
    for one in [*groups[1:], None]:
        if one is not None and int(one[0][part]) == int(run[-1][0][part]) + 1:
            run.append(one)
            continue
        if len(run) < FOLDED:
            out += run
        else:
            name, facts, _ = run[0]
            span = f"{name[part]}-{run[-1][0][part]}"
            members = [at for _, _, places in run for at in places]
            out.append(((*name[:part], span, *name[part + 1 :]), facts, members))
        run = [] if one is None else [one]
    return out


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. None makes an empty cell. What is not printable is escaped, so a cell is always one line."""
    texts = [
        ["" if cell is None else printable(str(cell)).replace("|", r"\|") for cell in row] for row in (heads, *rows)
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in texts]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])
