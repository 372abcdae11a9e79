"""The numbers of a study: their mean and range over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maecho.formatting import markdown_table
from maecho.lab import charts
from maecho.lab import experiment as configs
from maecho.lab.charts import Chart
from maecho.lab.report.drawing.figures import svg_file
from maecho.lab.studies.config import Study

SHOWN = 4
"""How many digits of a number are shown."""
MOST_PICTURES = 4
"""docs/results.md shows so many charts of a study. The page of `maecho report` shows all."""


@dataclass(frozen=True)
class Finding:
    """One number of a study, over its seeds."""

    name: str
    mean: float
    low: float
    high: float

    @property
    def range(self) -> str:
        """From the lowest to the highest; empty if they show as one."""
        low, high = short(self.low), short(self.high)
        return "" if low == high else f"{low} to {high}"


def findings(study: Study, results: Mapping[str, Any]) -> list[Finding]:
    """Every number of the runs with the config's seeds."""
    runs = [run["numbers"] for run in results["runs"] if run["seed"] in study.seeds]
    found = []
    for name in dict.fromkeys(name for numbers in runs for name in numbers):
        values = [numbers[name] for numbers in runs if name in numbers]
        found.append(Finding(name, statistics.fmean(values), min(values), max(values)))
    return found


def short(number: float) -> str:
    """A number in few digits: 97.86, 0.00123, 1.2e-09."""
    return f"{float(f'{number:.{SHOWN}g}'):g}"


def findings_markdown(study: Study, results: Mapping[str, Any]) -> str:
    """A table with a row for each number. Numbers whose names are "row: column" have a table of their own."""
    found = findings(study, results)
    seeds = len([run for run in results["runs"] if run["seed"] in study.seeds])
    over = f"mean of {seeds} seeds" if seeds > 1 else "with one seed"
    crossed = _crossed(found)
    plain = [one for one in found if one.name not in {cell.name for row in crossed.values() for cell in row.values()}]
    parts = []
    if plain or not crossed:
        rows = [[one.name, short(one.mean), one.range] for one in plain]
        parts.append(markdown_table(("what was measured", over, "range"), rows))
    if crossed:
        columns = list(dict.fromkeys(column for row in crossed.values() for column in row))
        cells = [[name, *(_in_cell(row.get(column)) for column in columns)] for name, row in crossed.items()]
        parts.append(markdown_table((over, *columns), cells))
    return "\n\n".join(parts)


def _crossed(found: Sequence[Finding]) -> dict[str, dict[str, Finding]]:
    """Row -> column -> number, of numbers that are named "row: column", if several rows have a column in common."""
    rows: dict[str, dict[str, Finding]] = {}
    for one in found:
        row, colon, column = one.name.partition(": ")
        if colon:
            rows.setdefault(row, {})[column] = one
    several = sum(len(row) for row in rows.values()) > len({column for row in rows.values() for column in row})
    return rows if several else {}


def _in_cell(one: Finding | None) -> str:
    if one is None:
        return ""
    return f"{short(one.mean)} ({one.range})" if one.range else short(one.mean)


def study_section(study: Study, results: Mapping[str, Any]) -> str:
    """What the config says in `[document]`, and what was measured."""
    document = study.document
    parts = [
        f"## {document.heading or study.title}",
        document.text.strip(),
        findings_markdown(study, results),
        "\n".join(f"![{chart.title}](figures/{file})" for file, chart in picture_files(study, results).items()),
        f"`maecho reproduce {study.name}`",
    ]
    return "\n\n".join(part for part in parts if part)


def picture_files(study: Study, results: Mapping[str, Any]) -> dict[str, Chart]:
    """File name -> the chart in it: the first charts of the first seed."""
    first: list[Any] = next((run["charts"] for run in results["runs"] if run["seed"] in study.seeds), [])
    return {f"{study.name}-{k}.svg": charts.read(chart) for k, chart in enumerate(first[:MOST_PICTURES], start=1)}


def study_sections() -> list[tuple[int, str, str]]:
    """The order, the name and the section of every study that has results."""
    return [(one.document.order, one.name, study_section(one, results)) for one, results in measured_studies()]


def study_pictures() -> dict[str, str]:
    """File name -> the SVG, of all pictures that the sections show."""
    return {
        file: svg_file(chart)
        for study, results in measured_studies()
        for file, chart in picture_files(study, results).items()
    }


def measured_studies() -> list[tuple[Study, dict[str, Any]]]:
    """Every study that has results beside its config."""
    found = []
    for name in configs.every_name():
        path = configs.folder() / "results" / f"{name}.json"
        if configs.is_study(name) and path.is_file():
            found.append((Study.load(name), json.loads(path.read_text(encoding="utf-8"))))
    return found
