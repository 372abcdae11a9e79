"""The section of one study: its words, and of every run its numbers and charts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from maecho.lab.report.drawing.markup import Markup, element, join
from maecho.lab.report.page.collected import Study, StudyRun
from maecho.lab.report.page.folds import fold
from maecho.lab.report.page.plots import plot, plots
from maecho.lab.report.page.tables import Cell, facts, table
from maecho.lab.report.page.words import paragraphs, stand_in
from maecho.lab.report.standing import QUICK


def heading(study: Study) -> str:
    return f"{study.title}{' (quick)' if study.quick else ''}"


def section(study: Study) -> Markup:
    """All of one study. The charts of the first seed are shown, those of the others are a click away."""
    parts = [
        paragraphs(study.text),
        stand_in(*QUICK) if study.quick else None,
        _numbers(study),
        *(_run(run, i == 0) for i, run in enumerate(study.runs)),
        element("p", "There are no runs yet.") if not study.runs else None,
    ]
    return element("section", element("h2", heading(study), id=study.name), *parts, aria_labelledby=study.name)


def _run(run: StudyRun, shown: bool) -> Markup:
    drawn = plots(*(plot(chart) for chart in run.charts))
    about = facts(
        (name, element("code", said) if name in ("data", "code") else _said(said)) for name, said in run.about.items()
    )
    seed = run.about["seed"]
    if shown:
        return join(drawn, fold(f"How seed {seed} was run", about))
    return fold(f"Seed {seed}: charts, and how it was run", drawn, about)


def _numbers(study: Study) -> Markup | None:
    """A row for every number, a column for every seed."""
    flat = [flattened(run.numbers) for run in study.runs]
    names = list(dict.fromkeys(name for numbers in flat for name in numbers))
    if not names:
        return None
    rows = [[Cell(name, name), *(_cell(numbers.get(name)) for numbers in flat)] for name in names]
    heads = ["what was measured", *(f"seed {run.about['seed']}" for run in study.runs)]
    if len(flat) > 1:
        heads.append("mean")
        for row in rows:
            known = [cell.value for cell in row[1:]]
            row.append(_cell(fmean(map(float, known)) if None not in known else None))  # type: ignore[arg-type]
    return table(f"{heading(study)}: numbers", heads, rows)


def flattened(numbers: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Numbers by one name each; those of an inner table have its name before their own."""
    found: dict[str, Any] = {}
    for name, value in numbers.items():
        full = f"{before}{name}"
        if isinstance(value, Mapping):
            found |= flattened(value, f"{full}, ")
        else:
            found[full] = value
    return found


def _cell(value: Any) -> Cell:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Cell(_said(value), float(value) if number else None, "number")


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_said(one)}" for key, one in value.items())
    return ", ".join(map(_said, value)) if isinstance(value, list) else str(value)
