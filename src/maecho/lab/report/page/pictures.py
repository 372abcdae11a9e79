"""The charts of an experiment: accuracy over steps, accuracy against bytes, and ours against the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maecho.lab.charts import Chart, Lines, Scatter
from maecho.lab.experiment import Experiment
from maecho.lab.report.curves import panels
from maecho.lab.report.drawing.drawn import Look
from maecho.lab.report.tables import Table, words

Picture = tuple[Chart, Look]
BYTES = Look(x="log", y="error", names=True, width=620, height=430)
AGAINST = Look(diagonal=True, width=460, height=400)
FEWEST = 4
"""Figures of the paper that are worth a picture."""


def pictures(experiment: Experiment, results: Mapping[str, Any], table: Table) -> list[Picture]:
    """All charts of the experiment, in the order of the page."""
    found: list[Picture] = []
    if "curves" in experiment.document.shows:
        found += [(chart, Look()) for chart in curves(experiment, results)]
    if "uploads" in experiment.document.shows:
        found += [(chart, BYTES) for chart in uploads(experiment, table)]
    chart = against_paper(experiment, table)
    return [*found, (chart, AGAINST)] if chart else found


def curves(experiment: Experiment, results: Mapping[str, Any]) -> list[Lines]:
    """A chart for every cell: the curves, and a level for every column that has one accuracy alone."""
    return [
        Lines(
            f"{experiment.title}: {words(panel.cell)}",
            "step",
            "accuracy, per cent",
            {column: [[float(step), value] for step, value in curve.items()] for column, curve in panel.curves.items()},
            dict(panel.levels),
        )
        for panel in panels(experiment, results)
    ]


def uploads(experiment: Experiment, table: Table) -> list[Scatter]:
    """A chart for every cell: accuracy against what a client uploads."""
    found = []
    for cell, figures in table:
        groups = {column: [[f.bytes / 1e6, f.mean]] for column, f in figures.items() if f.bytes}
        if groups:
            title = f"{experiment.title}: {words(cell)}"
            found.append(Scatter(title, "a client uploads, MB", "accuracy, per cent", groups))
    return found


def against_paper(experiment: Experiment, table: Table) -> Scatter | None:
    """Every figure that the paper has too: the paper's across, ours up."""
    groups: dict[str, list[list[float]]] = {}
    for _, figures in table:
        for column, figure in figures.items():
            if figure.paper is not None:
                groups.setdefault(column, []).append([figure.paper, figure.mean])
    if sum(map(len, groups.values())) < FEWEST:
        return None
    title = f"{experiment.title}: ours against the paper's, a point for every cell"
    return Scatter(title, "the paper's accuracy", "our accuracy", groups)


def overview(found: list[tuple[str, Experiment, Table]]) -> Scatter | None:
    """MA-Echo in all tables: the paper's accuracy across, ours up."""
    groups = {}
    for heading, experiment, table in found:
        chart = against_paper(experiment, table)
        points = chart.groups.get("ma-echo") if chart else None
        if points:
            groups[heading] = points
    return Scatter("MA-Echo: ours against the paper's, a point for every cell", "the paper's accuracy", "our accuracy",
                   groups) if groups else None  # fmt: skip
