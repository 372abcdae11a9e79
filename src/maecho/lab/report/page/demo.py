"""The page of `maecho demo`: what every client has and sends, and how good the merged models are, class by class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from maecho import disk
from maecho.errors import InputError
from maecho.formatting import size
from maecho.lab.charts import Bubbles, Lines, Scatter
from maecho.lab.demo import Demo, Row
from maecho.lab.report.drawing.drawn import Look
from maecho.lab.report.drawing.markup import Markup, element, join
from maecho.lab.report.page.document import document, maker_of, note
from maecho.lab.report.page.plots import plot, plots
from maecho.lab.report.page.tables import Cell, table

MAKER = "maecho demo"
NAME = "report.html"
"""The page's name in the folder of the demo."""
BEGINNING = 4096
"""Bytes of a page that say which command made it."""
SECONDS = Look(x="log", names=True, width=480, height=330)


def place(folder: Path) -> Path:
    """Where the page goes. Raises InputError unless the place is free, or holds the page of an earlier demo."""
    path = folder / NAME
    if os.path.lexists(path):
        with disk.regular(path) as file:
            beginning = file.read(BEGINNING).decode(errors="replace")
        if maker_of(beginning) != MAKER:
            raise InputError(f"{path} must be free or hold what an earlier demo wrote, got another file")
    return path


def page(demo: Demo, how: str) -> str:
    """One HTML file. `how` says what was run."""
    lead = (
        f"{len(demo.uploads)} clients share the digits of scikit-learn. Each trains a network on its own part and "
        "uploads one file. The server merges the files; echo-relay asks the clients again. Run by: "
    )
    links = [("clients", "What the clients have"), ("models", "How good the models are")]
    return document(
        "One-shot federated learning of digits",
        note(join(lead, element("code", how))),
        links,
        [_clients(demo), _models(demo)],
        MAKER,
    )


def _clients(demo: Demo) -> Markup:
    rows = [
        [
            Cell(Path(path).name, path),
            Cell(f"{sum(counts):,}", float(sum(counts)), "number"),
            Cell(str(sum(count > 0 for count in counts)), float(sum(count > 0 for count in counts)), "number"),
            Cell(size(sent), float(sent), "number"),
        ]
        for path, counts, sent in zip(demo.uploads, demo.class_counts, demo.upload_bytes, strict=True)
    ]
    chart = Bubbles("Examples of each digit at each client", "class", "client", [list(c) for c in demo.class_counts])
    return element(
        "section",
        element("h2", "What the clients have", id="clients"),
        plots(plot(chart)),
        table("The files that leave the clients", ("file", "examples", "classes", "size"), rows),
        aria_labelledby="clients",
    )


def _models(demo: Demo) -> Markup:
    classes = range(len(demo.rows[0].per_class))
    curves = {row.name: [[float(k), 100 * row.per_class[k]] for k in classes] for row in demo.rows}
    timed = {row.name: [[row.seconds, 100 * row.accuracy]] for row in demo.rows if row.seconds}
    return element(
        "section",
        element("h2", "How good the models are", id="models"),
        _accuracies(demo.rows),
        plots(
            plot(Lines("Accuracy on each digit", "class", "accuracy, per cent", curves)),
            plot(Scatter("Accuracy and seconds", "seconds after the uploads", "accuracy, per cent", timed), SECONDS),
        ),
        _per_class(demo.rows),
        aria_labelledby="models",
    )


def _accuracies(rows: Sequence[Row]) -> Markup:
    lines = [
        [
            Cell(row.name, row.name),
            Cell(f"{100 * row.accuracy:.2f} %", row.accuracy, "number"),
            Cell(
                element("meter", f"{100 * row.accuracy:.0f} %", min="0", max="1", value=f"{row.accuracy:.4f}"),
                row.accuracy,
            ),
            Cell(f"{row.seconds:.3f}" if row.seconds else "", row.seconds or None, "number"),
            Cell(Path(row.file).name if row.file else ""),
        ]
        for row in rows
    ]
    return table("Accuracy on all ten digits", ("model", "accuracy", "from 0 to 100 %", "seconds", "file"), lines)


def _meter(share: float) -> Markup:
    return element("meter", f"{100 * share:.0f} %", min="0", max="1", value=f"{share:.4f}")


def _per_class(rows: Sequence[Row]) -> Markup:
    lines = [
        [Cell(row.name, row.name), *(Cell(f"{100 * share:.0f}", share, "number") for share in row.per_class)]
        for row in rows
    ]
    heads = ("model", *map(str, range(len(rows[0].per_class))))
    return table("Accuracy on each digit, in per cent", heads, lines)
