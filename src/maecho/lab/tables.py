"""The tables that results make: means over seeds beside the paper's figures, and the ladder of rounds.

Everything here is read from results; nothing is run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maecho.formatting import markdown_table, size
from maecho.lab.experiment import Cell, Experiment, folder, names, settings


@dataclass(frozen=True)
class Figure:
    """One column of one cell over seeds, and what the paper says."""

    mean: float
    low: float
    high: float
    seeds: int
    paper: float | None
    bytes: float | None
    """What the client uploads that uploads most; None if that was not counted."""
    current: bool = True
    """Measured with the settings that the config has now."""

    def __str__(self) -> str:
        """Mean, half the range, † if measured with other settings than the config has now, and the paper's figure."""
        published = "" if self.paper is None else f" [{self.paper:.1f}]"
        return f"{self.mean:.1f} ± {(self.high - self.low) / 2:.1f}{'' if self.current else '†'}{published}"


Table = Sequence[tuple[Cell, Mapping[str, Figure]]]
"""A row for every cell that has runs: column -> figure."""


@dataclass(frozen=True)
class Rung:
    """One column of a table, as a step from one shot to a round a layer."""

    name: str
    rounds: int | str
    asked: str
    """At which layers real data are asked."""
    bytes: float
    """What a client uploads in all rounds."""
    accuracies: tuple[float | None, ...]
    """In per cent, cell by cell; None where it was not measured."""


@dataclass(frozen=True)
class Ladder:
    """All rungs of one experiment, in the order of its config."""

    title: str
    weights: int
    """Bytes of the weights."""
    cells: tuple[str, ...]
    rungs: tuple[Rung, ...]


def summarise(experiment: Experiment, results: Mapping[str, Any]) -> list[tuple[Cell, dict[str, Figure]]]:
    """Mean and spread over seeds for every cell that has runs."""
    published = json.loads((folder() / "paper.json").read_text(encoding="utf-8")) if experiment.paper else {}
    rows = published[experiment.paper["table"]]["rows"] if experiment.paper and not experiment.quick else []
    aliases = experiment.paper.get("columns", {})
    table = []
    for cell in experiment.cells:
        runs = [run for run in results["runs"] if run["cell"] == cell]
        if not runs:
            continue
        row = _published_row(experiment, cell, rows)
        figures = {}
        for column in experiment.methods:
            found = [run["columns"][column] for run in runs if column in run["columns"]]
            if not found:
                continue  # a column that was added since and not run yet
            values, sizes = [one["accuracy"] for one in found], [one.get("bytes") for one in found]
            figures[column] = Figure(
                statistics.fmean(values),
                min(values),
                max(values),
                len(values),
                row.get(aliases.get(column, column)),
                None if None in sizes else statistics.fmean(sizes),
                all(one.get("settings") == settings(experiment.methods[column]) for one in found),
            )
        table.append((cell, figures))
    return table


def _published_row(experiment: Experiment, cell: Cell, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of the paper's table that is about this cell; empty if there is none."""
    if any(cell[key] != value for key, value in experiment.paper.get("cells", {}).items()):
        return {}
    fixed = {**{key: cell[key] for key in experiment.paper.get("row", ())}, **experiment.paper.get("where", {})}
    return next((row for row in rows if all(_same(row.get(k), v) for k, v in fixed.items())), {})


def _same(published: Any, ours: Any) -> bool:
    """Table 4 writes "diff" for what we call different."""
    return published == ours or (published, ours) == ("diff", "different")


def markdown(experiment: Experiment, table: Table) -> str:
    """The table for a document, a row for every cell. Columns that were never run are left out."""
    keys = list(experiment.cells[0])
    columns = [column for column in experiment.methods if any(column in figures for _, figures in table)]
    rows = [[*(cell[key] for key in keys), *(figures.get(column) for column in columns)] for cell, figures in table]
    return markdown_table([*keys, *columns], rows)


def upload_markdown(experiment: Experiment, table: Table) -> str:
    """The same the other way round, a row for every column, with what a client uploads for it."""
    rows = []
    for column in experiment.methods:
        figures = [figures.get(column) for _, figures in table]
        sizes = [figure.bytes for figure in figures if figure is not None and figure.bytes is not None]
        if any(figures):
            rows.append([column, size(max(sizes)) if sizes else None, *figures])
    return markdown_table(["column", "a client uploads", *(_words(cell) for cell, _ in table)], rows)


def ladders() -> list[Ladder]:
    """One for every experiment whose document shows a ladder and of which there are results with bytes."""
    found = []
    for name in names():
        experiment = Experiment.load(name)
        path = folder() / "results" / f"{name}.json"
        if "ladder" in experiment.document.shows and path.is_file():
            one = ladder(experiment, json.loads(path.read_text(encoding="utf-8")))
            found += [one] if one.rungs and one.weights else []
    return found


def ladder(experiment: Experiment, results: Mapping[str, Any]) -> Ladder:
    table = summarise(experiment, results)
    rungs = []
    for column, options in experiment.methods.items():
        if options["method"] not in ("echo-chain", "echo-relay"):
            continue
        figures = [figures.get(column) for _, figures in table]
        figures = [figure if figure is not None and figure.current else None for figure in figures]
        sizes = [figure.bytes for figure in figures if figure is not None and figure.bytes is not None]
        if not sizes:
            continue
        rounds = 1 if options["method"] == "echo-chain" else options.get("rounds", "all")
        accuracies = tuple(None if figure is None else figure.mean for figure in figures)
        number = len(rounds) + 1 if isinstance(rounds, list) else rounds
        rungs.append(Rung(column, number, _asked(rounds), max(sizes), accuracies))
    return Ladder(
        experiment.title,
        max((run["weights_bytes"] for run in results["runs"] if "weights_bytes" in run), default=0),
        tuple(_words(cell) for cell, _ in table),
        tuple(rungs),
    )


def _words(cell: Cell) -> str:
    return f"{cell['clients']} clients, beta {cell['beta']}, {cell.get('init', 'same')} init"


def _asked(rounds: int | str | list[str]) -> str:
    if isinstance(rounds, int):
        return {1: "nowhere", 2: "at the head"}.get(rounds, f"at the last {rounds - 1} layers")
    return "at every layer" if rounds == "all" else f"at {', '.join(rounds)}"


def ladder_markdown(one: Ladder) -> str:
    """For a document."""
    heads = ("column", "rounds", "real data asked", "a client uploads", "times the weights", *one.cells)
    rows = []
    for rung in one.rungs:
        accuracies = [None if accuracy is None else f"{accuracy:.1f}" for accuracy in rung.accuracies]
        rows.append(
            [rung.name, rung.rounds, rung.asked, size(rung.bytes), f"{rung.bytes / one.weights:.1f}", *accuracies]
        )
    return markdown_table(heads, rows)
