"""Tables of a page: they scroll inside their own frame, and sort by every column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from maecho.lab.report.drawing.markup import Markup, element, join, text


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    content: object
    value: float | str | None = None
    """What the column is sorted by. None: such cells come last."""
    kind: str = ""
    """Classes of CSS."""


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    keys: int = 1,
    sortable: bool = True,
    class_: str = "",
) -> Markup:
    """A table whose first `keys` columns say what its rows are, and stay in sight."""
    rows = list(rows)
    kinds = ["number" if rows and all(row[i].kind == "number" for row in rows) else "" for i in range(len(heads))]
    titles = [
        element(
            "th",
            element("button", head, type="button") if sortable else head,
            scope="col",
            aria_sort="none" if sortable else None,
            class_="key" if i < keys else kinds[i] or None,
        )
        for i, head in enumerate(heads)
    ]
    lines = []
    for i, row in enumerate(rows):
        cells = [_cell(cell, k < keys, sortable) for k, cell in enumerate(row)]
        lines.append(element("tr", *cells, data_row=i if sortable else None))
    inside = element(
        "table", element("caption", caption), element("thead", element("tr", *titles)), element("tbody", *lines),
        class_=class_ or None,
    )  # fmt: skip
    return element("div", inside, class_="scroll", role="region", aria_label=caption, tabindex="0")


def _cell(cell: Cell, key: bool, sortable: bool) -> Markup:
    value = None if cell.value is None or not sortable else cell.value
    if isinstance(value, float):
        value = f"{value:.10g}"
    kind = " ".join(part for part in ("key" if key else "", cell.kind) if part)
    if key:
        return element("th", cell.content, scope="row", data_v=value, class_=kind)
    return element("td", cell.content, data_v=value, class_=kind or None)


def plain(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table of texts alone, as small as can be: the numbers behind a picture."""
    titles = join(*(Markup(f"<th scope=col>{text(head)}</th>") for head in heads))
    lines = [
        Markup(f"<tr><th scope=row>{text(row[0])}</th>{''.join(f'<td>{text(one)}</td>' for one in row[1:])}</tr>")
        for row in rows
    ]
    inside = element(
        "table", element("caption", caption), element("thead", element("tr", titles)), element("tbody", *lines)
    )
    return element("div", inside, class_="scroll small", role="region", aria_label=caption, tabindex="0")


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Names with what is to be said of each."""
    return element("dl", *(join(element("dt", name), element("dd", said)) for name, said in pairs), class_="facts")
