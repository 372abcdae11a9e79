"""Accuracies after some of a method's steps: the paper's figures over iterations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maecho.formatting import markdown_table
from maecho.lab.experiment import Cell, Experiment
from maecho.lab.report.tables import words


@dataclass(frozen=True)
class Panel:
    """The curves of one cell, and the columns that have one accuracy alone."""

    cell: Cell
    curves: Mapping[str, Mapping[int, float]]
    """Column -> step -> the mean accuracy over seeds."""
    levels: Mapping[str, float]
    """Column -> its mean accuracy."""


def panels(experiment: Experiment, results: Mapping[str, Any]) -> list[Panel]:
    """A panel for every cell that has runs."""
    found = []
    for cell in experiment.cells:
        runs = [r["columns"] for r in results["runs"] if r["cell"] == cell and r["seed"] in experiment.seeds]
        by_column = {column: [run[column] for run in runs if column in run] for column in experiment.methods}
        curves = {
            column: _mean([dict(record["curve"]) for record in records])
            for column, records in by_column.items()
            if records and all("curve" in record for record in records)
        }
        levels = {
            column: statistics.fmean(record["accuracy"] for record in records)
            for column, records in by_column.items()
            if records and column not in curves
        }
        if curves or levels:
            found.append(Panel(cell, curves, levels))
    return found


def _mean(curves: list[dict[int, float]]) -> dict[int, float]:
    """The mean at every step that all curves have."""
    steps = set.intersection(*(set(curve) for curve in curves))
    return {step: statistics.fmean(curve[step] for curve in curves) for step in sorted(steps)}


def curves_markdown(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """For every cell a table with a row for each curve, and one line of all other columns."""
    parts = []
    for panel in panels(experiment, results):
        steps = sorted({step for curve in panel.curves.values() for step in curve})
        rows = [[column, *(_figure(curve.get(s)) for s in steps)] for column, curve in panel.curves.items()]
        parts.append(markdown_table([f"{words(panel.cell)}: after step", *map(str, steps)], rows))
        if panel.levels:
            said = ", ".join(f"`{column}` {accuracy:.1f}" for column, accuracy in panel.levels.items())
            parts.append(f"Beside them: {said}.")
    return "\n\n".join(parts)


def _figure(accuracy: float | None) -> str | None:
    return None if accuracy is None else f"{accuracy:.1f}"
