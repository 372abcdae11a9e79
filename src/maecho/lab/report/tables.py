"""Tables of results: means over seeds beside the paper's figures, and the ladder of rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maecho.formatting import markdown_table, size
from maecho.lab.columns import settings
from maecho.lab.experiment import Cell, Experiment, folder, names

OLD_SETTINGS, OLD_CLIENTS = "†", "‡"
MARKS = {
    OLD_SETTINGS: "measured with other settings than the config has now",
    OLD_CLIENTS: "measured on other clients than the rest of its cell",
}


@dataclass(frozen=True)
class Figure:
    """One column of one cell: its figures over all seeds, and the paper's."""

    mean: float
    low: float
    high: float
    seeds: int
    paper: float | None
    bytes: float | None
    """The upload size of the client that sends the most. None if it was not counted."""
    marks: str = ""
    """A selection of MARKS: how the figure differs from its neighbours."""
    recipes: tuple[str, ...] = ()
    """How those records were made that are older than their format."""

    @property
    def current(self) -> bool:
        """Whether it was measured as the config says, on the clients of its cell."""
        return not self.marks

    def __str__(self) -> str:
        """Mean, half the range, marks, and the paper's figure."""
        published = "" if self.paper is None else f" [{self.paper:.1f}]"
        return f"{self.mean:.1f} ± {(self.high - self.low) / 2:.1f}{self.marks}{published}"


Table = Sequence[tuple[Cell, Mapping[str, Figure]]]
"""A row for every cell that has runs: column -> figure."""


@dataclass(frozen=True)
class Rung:
    """One column of a table, as one rung of the ladder that leads from one shot to a round for every layer."""

    name: str
    rounds: int | str
    asked: str
    """At which layers real data are asked."""
    bytes: float
    """What a client uploads in all rounds."""
    accuracies: tuple[float | None, ...]
    """Accuracies in per cent, cell by cell. None if a cell was not measured."""


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
    rows = published_rows(experiment)
    table = []
    for cell in experiment.cells:
        runs = [run for run in results["runs"] if run["cell"] == cell and run["seed"] in experiment.seeds]
        if not runs:
            continue
        figures = {}
        for column, options in experiment.methods.items():
            found = [(run, run["columns"][column]) for run in runs if column in run["columns"]]
            if found:  # a column may have been added since, and not run yet
                figures[column] = _figure(found, settings(options), published(experiment, cell, column, rows))
        table.append((cell, figures))
    return table


def _figure(found: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], current: str, paper: float | None) -> Figure:
    """One figure from the runs of a cell and their records of one column."""
    records = [record for _, record in found]
    values: list[float] = [record["accuracy"] for record in records]
    sizes = [record.get("bytes") for record in records]
    old_settings = any(record["settings"] != current for record in records)
    old_clients = any(run["clients"] not in _clients(record) for run, record in found)
    return Figure(
        statistics.fmean(values),
        min(values),
        max(values),
        len(values),
        paper,
        None if None in sizes else statistics.fmean(map(float, sizes)),  # type: ignore[arg-type]
        (OLD_SETTINGS if old_settings else "") + (OLD_CLIENTS if old_clients else ""),
        tuple(sorted({record["recipe"] for record in records if "recipe" in record})),
    )


def _clients(record: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The clients that a record was measured on, and those on which it is trusted to be the same."""
    return record["clients"], record.get("trusted", {}).get("clients")


def published_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """The rows of the paper's table that the experiment reproduces; none for quick runs."""
    if not experiment.paper or experiment.quick:
        return []
    table = json.loads((folder() / "paper.json").read_text(encoding="utf-8"))[experiment.paper["table"]]
    where = experiment.paper.get("where", {})
    return [row for row in table["rows"] if all(row.get(key) == value for key, value in where.items())]


def published_column(experiment: Experiment, column: str) -> str | None:
    """The name of our column in the paper; None if it is not there. A name stands for one column alone, unless the
    paper has its figures in several rows."""
    aliases = experiment.paper.get("columns", {})
    return aliases.get(column) or (None if column in aliases.values() else column)


def published(experiment: Experiment, cell: Cell, column: str, rows: Sequence[dict[str, Any]]) -> float | None:
    """The paper's figure for our column in this cell; None if it has none."""
    if any(cell.get(key) != value for key, value in experiment.paper.get("cells", {}).items()):
        return None
    asked = experiment.paper.get("rows", {}).get(column, {})
    if "rows" in experiment.paper and not asked:
        return None
    row = next((row for row in rows if about(experiment, cell, row) and asked.items() <= row.items()), {})
    return row.get(published_column(experiment, column) or "")


def about(experiment: Experiment, cell: Cell, row: Mapping[str, Any]) -> bool:
    """Whether a row of the paper's table is about this cell."""
    aliases = experiment.paper.get("alias", {})
    for key in experiment.paper.get("row", ()):
        ours = cell.get(key)
        theirs = next((one for own, one in aliases.get(key, ()) if own == ours), ours)
        if row.get(key) != theirs:
            return False
    return True


def markdown(experiment: Experiment, table: Table) -> str:
    """The table for a document, a row for every cell. Columns that were never run are left out."""
    keys = list(experiment.cells[0])
    columns = [column for column in experiment.methods if any(column in figures for _, figures in table)]
    rows = [[*(cell.get(k) for k in keys), *(figures.get(column) for column in columns)] for cell, figures in table]
    return markdown_table([*keys, *columns], rows)


def upload_markdown(experiment: Experiment, table: Table) -> str:
    """The same table with a row for each column of the config, and how much a client uploads for it."""
    rows = []
    for column in experiment.methods:
        figures = [figures.get(column) for _, figures in table]
        sizes = [figure.bytes for figure in figures if figure is not None and figure.bytes is not None]
        if any(figures):
            rows.append([column, size(max(sizes)) if sizes else None, *figures])
    return markdown_table(["column", "a client uploads", *(words(cell) for cell, _ in table)], rows)


def ladders() -> list[Ladder]:
    """The ladders of all experiments whose document shows one, if there are results with bytes."""
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
        figures = [None if figure is None or OLD_SETTINGS in figure.marks else figure for figure in figures]
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
        tuple(words(cell) for cell, _ in table),
        tuple(rungs),
    )


def words(cell: Cell) -> str:
    """A cell in words: "5 clients, beta 0.01, same init"."""
    said = {"clients": f"{cell.get('clients')} clients", "beta": f"beta {cell.get('beta')}"}
    parts = [said.get(key, f"{key} {value}") for key, value in cell.items() if key != "init"]
    return ", ".join([*parts, f"{cell['init']} init"] if "init" in cell else parts)


def _asked(rounds: int | str | list[str]) -> str:
    if isinstance(rounds, int):
        return {1: "nowhere", 2: "at the head"}.get(rounds, f"at the last {rounds - 1} layers")
    return "at every layer" if rounds == "all" else f"at {', '.join(rounds)}"


def ladder_markdown(one: Ladder) -> str:
    """A ladder as a Markdown table."""
    heads = ("column", "rounds", "real data asked", "a client uploads", "times the weights", *one.cells)
    rows = []
    for rung in one.rungs:
        accuracies = [None if accuracy is None else f"{accuracy:.1f}" for accuracy in rung.accuracies]
        rows.append(
            [rung.name, rung.rounds, rung.asked, size(rung.bytes), f"{rung.bytes / one.weights:.1f}", *accuracies]
        )
    return markdown_table(heads, rows)
