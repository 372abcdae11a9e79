"""Every run of an experiment, a click away: its partition, and of each column settings, seconds and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maecho.formatting import size
from maecho.lab.charts import Bubbles
from maecho.lab.experiment import Experiment
from maecho.lab.report.drawing.markup import Markup, element, join
from maecho.lab.report.page.folds import fold
from maecho.lab.report.page.plots import plot
from maecho.lab.report.page.tables import Cell, facts, table
from maecho.lab.report.tables import words

SECONDS = ("training", "gathering", "merging")


def runs_of(name: str, experiment: Experiment, results: Mapping[str, Any]) -> Markup | None:
    """A foldable part for every cell, with its seeds one below the other."""
    parts = []
    for i, cell in enumerate(experiment.cells):
        found = [run for run in results["runs"] if run["cell"] == cell]
        if found:
            seeds = ", ".join(str(run["seed"]) for run in found)
            head = f"{words(cell)}: seed{'s' if len(found) > 1 else ''} {seeds}"
            parts.append(fold(head, *map(_run, found), id=place(name, i)))
    return join(element("h3", "Runs"), *parts) if parts else None


def place(name: str, cell: int) -> str:
    """Where the runs of a cell are on the page."""
    return f"runs-{name}-{cell}"


def partition(run: Mapping[str, Any]) -> Bubbles:
    """How many examples of each class every client of the run has."""
    title = f"Examples of each class at each client: {words(run['cell'])}, seed {run['seed']}"
    return Bubbles(title, "class", "client", [list(counts) for counts in run["partition"]])


def _run(run: Mapping[str, Any]) -> Markup:
    said = f"{words(run['cell'])}, seed {run['seed']}"
    about: list[tuple[str, object]] = [("data", element("code", run["data"] or "not recorded"))]
    about.append(("clients", element("code", run["clients"])))
    if "weights_bytes" in run:
        about.append(("weights of one client", size(run["weights_bytes"])))
    made = made_with(run["columns"])
    about += [("made with", made[0])] if len(made) == 1 else []
    return element(
        "section",
        element("h4", f"Seed {run['seed']}"),
        facts(about),
        plot(partition(run)) if run.get("partition") else None,
        _records(f"Columns of the run: {said}", run["columns"]),
    )


def _records(caption: str, columns: Mapping[str, Mapping[str, Any]]) -> Markup:
    heads = ["column", "accuracy", "a client uploads", *(f"{part}, s" for part in SECONDS), "device", "settings"]
    rows = [_record(column, record) for column, record in columns.items()]
    if len(made_with(columns)) > 1:
        heads.append("made with")
        for row, record in zip(rows, columns.values(), strict=True):
            row.append(Cell(_made(record), _made(record), "long"))
    return table(caption, heads, rows, class_="records")


def made_with(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the columns were made with: versions, code and remarks. One text if all have the same."""
    return list(dict.fromkeys(_made(record) for record in columns.values()))


def _made(record: Mapping[str, Any]) -> str:
    parts = [f"{name} {version}" for name, version in record.get("versions", {}).items()]
    if record["code"]:
        parts.append(f"code {record['code']}")
    parts += [record["recipe"]] if "recipe" in record else []
    parts += [f"kept, though {reason}" for reason in record.get("trusted", {}).get("because", [])]
    return "; ".join(parts)


def _record(column: str, record: Mapping[str, Any]) -> list[Cell]:
    seconds = [record["seconds"].get(part) for part in SECONDS]
    sent = record.get("bytes")
    device, trained = record.get("device", ""), record.get("trained_on", "")
    return [
        Cell(column, column),
        Cell(f"{record['accuracy']:.2f}", float(record["accuracy"]), "number"),
        Cell("" if sent is None else size(sent), None if sent is None else float(sent), "number"),
        *(Cell("" if s is None else f"{s:.3g}", None if s is None else float(s), "number") for s in seconds),
        Cell(f"{device}, clients trained on {trained}" if trained and trained != device else device, device),
        Cell(element("code", record["settings"]), record["settings"], "long"),
    ]
