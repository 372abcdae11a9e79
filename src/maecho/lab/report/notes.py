"""What a reader must know of a table, as sentences made from its configuration and its records."""

from __future__ import annotations

from typing import Any

from maecho.lab.columns import NOT_METHODS, changes
from maecho.lab.experiment import Experiment
from maecho.lab.report.tables import MARKS, Table, about, published_column, published_rows


def notes(experiment: Experiment, table: Table) -> list[str]:
    """The sentences: settings that are no defaults, what is missing of the paper's table, and the marks."""
    shown = [column for column in experiment.methods if any(column in figures for _, figures in table)]
    return [*_settings(experiment, shown), *_missing(experiment, table), *_marks(table), *_recipes(experiment, table)]


def _settings(experiment: Experiment, shown: list[str]) -> list[str]:
    """Which columns set something, and what."""
    said = []
    for column in shown:
        options = experiment.methods[column]
        if found := changes(options):
            listed = ", ".join(_option(key, value) for key, value in found.items())
            said.append(f"`{column}` is `{options['method']}` with {listed}")
    plain = [column for column in shown if not changes(experiment.methods[column]) and column not in NOT_METHODS]
    defaults = f"{_list(plain)} {'have' if len(plain) > 1 else 'has'} the defaults" if plain else ""
    return [f"Settings: {'; '.join(part for part in (*said, defaults) if part)}."] if said else []


def _option(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{key} ({', '.join(_option(*pair) for pair in value.items())})"
    return f"{key} = {value}"


def _list(columns: list[str]) -> str:
    names = [f"`{column}`" for column in columns]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _missing(experiment: Experiment, table: Table) -> list[str]:
    """The cells and columns of the paper's table that have no figure of ours, and why."""
    rows = published_rows(experiment)
    if not rows:
        return []
    keys = list(experiment.paper.get("row", ()))
    ours = [cell for cell, figures in table if any(figure.paper is not None for figure in figures.values())]
    absent = [row for row in rows if not any(about(experiment, cell, row) for cell in ours)]
    measured = {published_column(experiment, column) for _, figures in table for column in figures}
    lost = [key for key, value in rows[0].items() if isinstance(value, float) and key not in (*keys, *measured)]
    lost = [key for key in lost if key not in (*experiment.paper.get("where", {}), *_asked(experiment))]
    parts = []
    if absent:
        cells = "; ".join(", ".join(f"{key} {row[key]}" for key in keys) for row in absent)
        parts.append(f"the cells {cells}")
    if lost:
        parts.append(f"the column{'s' if len(lost) > 1 else ''} {', '.join(lost)}")
    if not parts:
        return []
    said = f"Of the paper's table these are not here: {', and '.join(parts)}."
    return [f"{said} {experiment.paper.get('missing', '')}".strip()]


def _asked(experiment: Experiment) -> set[str]:
    """The keys by which a column finds its row."""
    return {key for asked in experiment.paper.get("rows", {}).values() for key in asked}


def _marks(table: Table) -> list[str]:
    used = {mark for _, figures in table for figure in figures.values() for mark in figure.marks}
    return [f"{mark} {words}." for mark, words in MARKS.items() if mark in used]


def _recipes(experiment: Experiment, table: Table) -> list[str]:
    """One sentence for each old recipe of figures that were made before records had today's format."""
    by_recipe: dict[str, list[str]] = {}
    for column in experiment.methods:
        for recipe in {recipe for _, figures in table if column in figures for recipe in figures[column].recipes}:
            by_recipe.setdefault(recipe, []).append(column)
    return [
        f"These figures were made by an older recipe: {_list(columns)} ({recipe})."
        for recipe, columns in sorted(by_recipe.items())
    ]
