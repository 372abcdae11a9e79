"""The section of one experiment: its words, its tables beside the paper's, its pictures, its notes and its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from maecho.formatting import size
from maecho.lab.experiment import Experiment
from maecho.lab.report.drawing.markup import Markup, element, join
from maecho.lab.report.notes import notes
from maecho.lab.report.page.collected import Measured
from maecho.lab.report.page.pictures import pictures
from maecho.lab.report.page.plots import plot, plots
from maecho.lab.report.page.runs import place, runs_of
from maecho.lab.report.page.tables import Cell, table
from maecho.lab.report.page.words import line, paragraphs, stand_in
from maecho.lab.report.seconds import published_seconds, seconds
from maecho.lab.report.standing import NEAR, merges, stand_ins
from maecho.lab.report.tables import Figure, Table, ladder, published_column, summarise, words


def caption(experiment: Experiment, found: Table, what: str = "") -> str:
    """What the figures of a table are."""
    published = any(figure.paper is not None for _, figures in found for figure in figures.values())
    paper = "; below it in brackets the paper's, then the difference" if published else ""
    start = f"{heading(experiment)}{what}: accuracy in per cent, mean over seeds ± half the range"
    return f"{start}{paper}. The best merged model of a cell is bold."


def heading(experiment: Experiment) -> str:
    """What the experiment is called on the page."""
    return f"{experiment.document.heading or experiment.title}{' (quick)' if experiment.quick else ''}"


def section(measured: Measured) -> Markup:
    """All of one experiment."""
    experiment, results, name = measured.experiment, measured.results, measured.name
    found = summarise(experiment, results)
    shows = experiment.document.shows
    chosen = [plot(chart, look) for chart, look in pictures(experiment, results, found)]
    said = notes(experiment, found) if found else []
    parts = [
        paragraphs(experiment.document.text),
        *(stand_in(*pair) for pair in stand_ins(experiment)),
        element("p", "There are no runs yet.") if not found else None,
        by_cell(name, experiment, found) if found and {"table", "curves"} & set(shows) else None,
        by_column(name, experiment, found) if found and "uploads" in shows else None,
        rungs(experiment, results) if found and "ladder" in shows else None,
        plots(*chosen),
        server_seconds(experiment, results) if found else None,
        join(element("h3", "Notes"), element("ul", *(element("li", line(one)) for one in said))) if said else None,
        runs_of(name, experiment, results),
        element("p", "To run it again: ", element("code", _command(experiment)), class_="again"),
    ]
    return element("section", element("h2", heading(experiment), id=name), *parts, aria_labelledby=name)


def _command(experiment: Experiment) -> str:
    return f"maecho reproduce {experiment.name}{' --quick' if experiment.quick else ''}"


def by_cell(name: str, experiment: Experiment, found: Table) -> Markup:
    """A row for every cell, a column for every method, and a way to the runs."""
    keys = list(experiment.cells[0])
    columns = [column for column in experiment.methods if any(column in figures for _, figures in found)]
    rows = []
    for cell, figures in found:
        best = _best(experiment, figures)
        rows.append(
            [
                *(Cell(str(cell.get(key, "")), _value(cell.get(key))) for key in keys),
                *(figure_cell(figures.get(column), column == best) for column in columns),
                seeds_cell(name, experiment, cell, figures),
            ]
        )
    return table(caption(experiment, found), [*keys, *columns, "seeds"], rows, keys=len(keys), class_="results")


def seeds_cell(name: str, experiment: Experiment, cell: Any, figures: Mapping[str, Figure]) -> Cell:
    """How many seeds were run, as a link to these runs."""
    seeds = max((figure.seeds for figure in figures.values()), default=0)
    link = element("a", str(seeds), href=f"#{place(name, experiment.cells.index(cell))}")
    return Cell(link, float(seeds), "number")


def by_column(name: str, experiment: Experiment, found: Table) -> Markup:
    """A row for every method, with what a client uploads for it, and a column for every cell."""
    best = [_best(experiment, figures) for _, figures in found]
    rows = []
    for column in experiment.methods:
        figures = [figures.get(column) for _, figures in found]
        sizes = [figure.bytes for figure in figures if figure is not None and figure.bytes is not None]
        if any(figures):
            sent = Cell(size(max(sizes)), max(sizes), "number") if sizes else Cell("", kind="number")
            cells = [figure_cell(figure, column == top) for figure, top in zip(figures, best, strict=True)]
            rows.append([Cell(column, column), sent, *cells])
    links = [replace(seeds_cell(name, experiment, *row), value=None) for row in found]
    rows.append([Cell("seeds"), Cell("", kind="number"), *links])
    said = caption(experiment, found, ", and what a client uploads")
    return table(said, ["column", "a client uploads", *(words(cell) for cell, _ in found)], rows, class_="results")


def figure_cell(figure: Figure | None, best: bool = False) -> Cell:
    """Ours, and below it the paper's with the difference."""
    if figure is None:
        return Cell("", kind="number")
    ours = f"{figure.mean:.1f} ± {(figure.high - figure.low) / 2:.1f}{figure.marks}"
    shown = element("strong", ours, class_="best") if best else element("span", ours)
    if figure.paper is None:
        return Cell(shown, figure.mean, "number")
    gap = figure.mean - figure.paper
    kind = "up" if gap >= 0 else "near" if gap >= -NEAR else "down"
    mark = element("span", signed(gap), class_=f"gap {kind}")
    return Cell(join(shown, element("small", f"[{figure.paper:.1f}] ", mark)), figure.mean, "number")


def signed(gap: float) -> str:
    """A difference with its sign."""
    return f"{gap:+.1f}".replace("-", "−")


def _best(experiment: Experiment, figures: Mapping[str, Figure]) -> str | None:
    merged = [column for column in figures if merges(experiment, column)]
    return max(merged, key=lambda column: figures[column].mean) if merged else None


def _value(key: object) -> float | str | None:
    if isinstance(key, (int, float)) and not isinstance(key, bool):
        return float(key)
    return None if key is None else str(key)


def rungs(experiment: Experiment, results: Any) -> Markup | None:
    """The ladder from one shot to a round a layer."""
    one = ladder(experiment, results)
    if not one.rungs or not one.weights:
        return None
    rows = [
        [
            Cell(rung.name, rung.name),
            Cell(str(rung.rounds), float(rung.rounds) if isinstance(rung.rounds, int) else None, "number"),
            Cell(rung.asked, rung.asked),
            Cell(size(rung.bytes), rung.bytes, "number"),
            Cell(f"{rung.bytes / one.weights:.1f}", rung.bytes / one.weights, "number"),
            *(Cell("" if a is None else f"{a:.1f}", a, "number") for a in rung.accuracies),
        ]
        for rung in one.rungs
    ]
    heads = ["column", "rounds", "real data asked", "a client uploads", "times the weights", *one.cells]
    return table(f"{heading(experiment)}: from one shot to a round a layer", heads, rows)


def server_seconds(experiment: Experiment, results: Any) -> Markup | None:
    """A row for every method, a column for every number of clients, the paper's seconds below ours."""
    if any("clients" not in run["cell"] for run in results["runs"]):
        return None
    found, published = seconds(experiment, results), published_seconds(experiment)
    rows = []
    for column in experiment.methods:
        if any(column in by_column for by_column in found.values()):
            theirs = published_column(experiment, column) or ""
            cells = [
                _seconds(by_column.get(column), published.get(str(clients), {}).get(theirs))
                for clients, by_column in found.items()
            ]
            rows.append([Cell(column, column), *cells])
    if not rows:
        return None
    paper = "; the paper's in brackets" if published else ""
    said = f"{heading(experiment)}: seconds on the server, median over cells and seeds{paper}"
    return table(said, ["column", *(f"{clients} clients" for clients in found)], rows)


def _seconds(ours: float | None, theirs: float | None) -> Cell:
    if ours is None:
        return Cell("", kind="number")
    paper = None if theirs is None else element("small", f"[{theirs:.3g}]")
    return Cell(join(element("span", f"{ours:.3g}"), paper), ours, "number")
