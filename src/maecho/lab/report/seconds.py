"""The time that the server needs for each method, beside the paper's."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from maecho.formatting import markdown_table
from maecho.lab.experiment import Experiment, folder
from maecho.lab.report.tables import published_column


def seconds(experiment: Experiment, results: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Number of clients -> column -> the median of its seconds of merging over all cells and seeds."""
    found: dict[int, dict[str, list[float]]] = {}
    for run in results["runs"]:
        for column, record in run["columns"].items():
            if column in experiment.methods and record["seconds"]["merging"]:
                by_column = found.setdefault(run["cell"]["clients"], {})
                by_column.setdefault(column, []).append(record["seconds"]["merging"])
    return {
        clients: {column: statistics.median(values) for column, values in by_column.items()}
        for clients, by_column in sorted(found.items())
    }


def published_seconds(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Number of clients, as text -> the paper's column -> its seconds. Empty if the paper has none."""
    if "table" not in experiment.paper or experiment.quick:
        return {}
    paper = json.loads((folder() / "paper.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, float]] = paper[experiment.paper["table"]].get("elapsed_seconds", {})
    return found


def seconds_markdown(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """A table with a row for each column, and the paper's seconds in brackets."""
    found, published = seconds(experiment, results), published_seconds(experiment)
    rows = []
    for column in experiment.methods:
        if any(column in by_column for by_column in found.values()):
            theirs = published_column(experiment, column)
            shown = [
                _words(by_column.get(column), published.get(str(clients), {}).get(theirs or ""))
                for clients, by_column in found.items()
            ]
            rows.append([column, *shown])
    return markdown_table(["seconds on the server", *(f"{clients} clients" for clients in found)], rows)


def _words(ours: float | None, theirs: float | None) -> str | None:
    if ours is None:
        return None
    return _figure(ours) if theirs is None else f"{_figure(ours)} [{_figure(theirs)}]"


def _figure(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
