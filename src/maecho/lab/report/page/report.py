"""The page of `maecho report`, and its pictures as files for a paper."""

from __future__ import annotations

import re
from collections.abc import Sequence

from maecho.lab.charts import Chart
from maecho.lab.report.drawing.drawn import Look
from maecho.lab.report.drawing.markup import Markup, element
from maecho.lab.report.page import experiments, studies
from maecho.lab.report.page.collected import Measured, Study
from maecho.lab.report.page.document import document, note
from maecho.lab.report.page.pictures import AGAINST, overview, pictures
from maecho.lab.report.page.plots import plot, plots
from maecho.lab.report.page.runs import partition
from maecho.lab.report.page.tables import Cell, table
from maecho.lab.report.standing import NEAR, above, complete, near, stand_ins
from maecho.lab.report.tables import Table, summarise, words

MAKER = "maecho report"
LEAD = (
    "Every table and figure that was reproduced, beside the paper's own (S. Su, B. Li, X. Xue: One-shot Federated "
    "Learning without Server-side Training, Neural Networks, 2023). Below our figure stands the paper's in brackets, "
    "and the difference. Click the head of a column to sort by it, and point at a picture or at a name below it to "
    "look closer. The number of seeds in a table leads to its runs."
)


def page(measured: Sequence[Measured], found: Sequence[Study]) -> str:
    """One HTML file of all results."""
    tables = [summarise(one.experiment, one.results) for one in measured]
    links = [("overview", "At a glance"), ("stand-ins", "What stands in for what")]
    everything: list[Measured | Study] = [*measured, *found]
    shown = sorted(everything, key=_place)
    links += [(one.name, _heading(one)) for one in shown]
    sections = [
        _overview(measured, tables),
        _stand_ins(measured),
        *(studies.section(one) if isinstance(one, Study) else experiments.section(one) for one in shown),
    ]
    return document("MA-Echo reproduced", note(LEAD), links, sections, MAKER)


def _place(one: Measured | Study) -> tuple[bool, int, str]:
    """Where its section comes: full runs first, then by the order that the config says."""
    if isinstance(one, Study):
        return one.quick, one.order, one.name
    return one.experiment.quick, one.experiment.document.order, one.name


def _heading(one: Measured | Study) -> str:
    return studies.heading(one) if isinstance(one, Study) else experiments.heading(one.experiment)


def _overview(measured: Sequence[Measured], tables: Sequence[Table]) -> Markup:
    rows = []
    for place, (one, found) in enumerate(zip(measured, tables, strict=True)):
        experiment = one.experiment
        there, close, best = complete(found, experiment), near(found, experiment), above(found, experiment)
        rows.append(
            [
                Cell(element("a", experiments.heading(experiment), href=f"#{one.name}"), float(place)),
                Cell(str(there), there.cells / max(there.of, 1), "number"),
                Cell(str(close), close.cells / close.of if close.of else None, "number"),
                Cell(str(best), best.cells / best.of if best.of else None, "number"),
            ]
        )
    heads = (
        "experiment", "figures measured", f"MA-Echo above the paper's or within {NEAR:g} points",
        "our best merged model above the paper's best",
    )  # fmt: skip
    names = [
        (experiments.heading(one.experiment), one.experiment, found)
        for one, found in zip(measured, tables, strict=True)
    ]
    chart = overview(names)
    return element(
        "section",
        element("h2", "At a glance", id="overview"),
        table("How far the results reach, and how they compare", heads, rows) if rows else None,
        plots(plot(chart, AGAINST)) if chart else None,
        aria_labelledby="overview",
    )


def _stand_ins(measured: Sequence[Measured]) -> Markup:
    rows = [
        [Cell(experiments.heading(one.experiment)), Cell(paper), Cell(here)]
        for one in measured
        for paper, here in stand_ins(one.experiment)
    ]
    said = (
        table("What stands in for what", ("experiment", "in the paper", "here"), rows, sortable=False)
        if rows
        else element("p", "Nothing: the experiments on this page use the paper's own data and networks.")
    )
    return element(
        "section", element("h2", "What stands in for what", id="stand-ins"), said, aria_labelledby="stand-ins"
    )


def figures(measured: Sequence[Measured], found: Sequence[Study]) -> dict[str, tuple[Chart, Look | None]]:
    """File name -> the chart in it, of all charts: those of the sections, of the partitions and of the studies."""
    named: list[tuple[str, Chart, Look | None]] = []
    for one in measured:
        shown = pictures(one.experiment, one.results, summarise(one.experiment, one.results))
        named += [(f"{one.name}-{i + 1}", *picture) for i, picture in enumerate(shown)]
        for run in one.results["runs"]:
            if run.get("partition"):
                name = f"{one.name}-partition-{words(run['cell'])}-seed-{run['seed']}"
                named.append((name, partition(run), None))
    for study in found:
        for study_run in study.runs:
            seed = study_run.about["seed"]
            named += [(f"{study.name}-seed-{seed}-{i + 1}", chart, None) for i, chart in enumerate(study_run.charts)]
    return {f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.svg": (chart, look) for name, chart, look in named}
