"""Prints tables and bars for people, with `rich`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from maecho.aggregation import Guide, Merged
from maecho.errors import printable
from maecho.evaluation import Evaluation
from maecho.formatting import size
from maecho.lab.report.findings import short
from maecho.lab.report.notes import notes
from maecho.lab.report.tables import Ladder
from maecho.progress import stderr

if TYPE_CHECKING:
    from maecho.lab.demo import Demo
    from maecho.lab.experiment import Experiment
    from maecho.lab.harness.runs import Event
    from maecho.lab.report.findings import Finding
    from maecho.lab.report.tables import Figure
    from maecho.lab.studies.config import Study

out = Console()


def print_json(content: Any) -> None:
    """Print JSON that holds only printable ASCII. `json` itself escapes every control character but DEL."""
    print(json.dumps(content, indent=1, default=str).replace("\x7f", "\\u007f"))


def plain(text: object, style: str = "") -> Text:
    """Show untrusted text, such as a name or a path, as it is: markup and escape sequences in it have no effect."""
    return Text(printable(str(text)), style)


def say(*parts: str | Text | tuple[str, str], whole: bool = False) -> None:
    """Print texts on one line, each with its own style. With `whole` the line is not broken, so that a path in it can
    be copied."""
    out.print(Text.assemble(*parts), soft_wrap=whole)


def show_demo(demo: Demo, folder: Path, page: Path) -> None:
    """Print the clients' uploads and the accuracy of every model."""
    who = Table(title=Text.assemble("The clients' uploads, in ", plain(folder)), title_justify="left")
    who.add_column("file")
    who.add_column("size", justify="right")
    who.add_column("examples of class 0 … 9", no_wrap=True)
    for path, written, counts in zip(demo.uploads, demo.upload_bytes, demo.class_counts, strict=True):
        who.add_row(plain(Path(path).name), size(written), " ".join(f"{c:3}" if c else "  ·" for c in counts))
    out.print(who)
    table = Table(title="Accuracy on all ten digits", title_justify="left")
    table.add_column("model")
    for column in ("accuracy", "calibration error", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("file")
    for row in demo.rows:
        error = "" if row.calibration_error is None else f"{100 * row.calibration_error:.1f} %"
        seconds = f"{row.seconds:.3f}" if row.seconds else ""
        table.add_row(row.name, f"{100 * row.accuracy:.1f} %", error, seconds, Path(row.file).name if row.file else "")
    out.print(table)
    say("What leaves a client: ", plain(f"maecho inspect {folder / 'client-0.safetensors'}", "bold"))
    say("All of it as a page: ", plain(page, "bold"), whole=True)


def show_merged(merged: Merged, path: Path) -> None:
    """Print how a model was merged, and what was only averaged."""
    recipe = merged.recipe
    how = f"{recipe['clients']} clients by {recipe['options']} in {recipe['seconds']} s"
    say(plain(path, "bold"), ": ", plain(how))
    if merged.averaged:
        say("Only averaged: ", plain(", ".join(merged.averaged)))


def show_evaluation(found: Evaluation, what: str) -> None:
    """Print the accuracy on each class and on all examples, and the calibration error."""
    table = Table(title=f"Accuracy of the {what}", title_justify="left")
    for column in ("class", "examples", "accuracy"):
        table.add_column(column, justify="right")
    for label, (n, share) in enumerate(zip(found.examples, found.per_class, strict=True)):
        table.add_row(str(label), str(n), "no example" if n == 0 else f"{100 * share:.2f} %")
    table.add_section()
    table.add_row("all", str(sum(found.examples)), f"{100 * found.accuracy:.2f} %")
    out.print(table)
    say(f"Calibration error: {100 * found.calibration_error:.2f} % (how far confidence is from accuracy)")


def show_methods(methods: Mapping[str, tuple[Guide, Mapping[str, Any]]]) -> None:
    """Print what each method does, needs and costs, and its options with their defaults."""
    for name, (guide, defaults) in methods.items():
        drawn = Table(title=name, title_justify="left", title_style="bold", show_header=False)
        drawn.add_column(no_wrap=True)
        drawn.add_column()
        for what, text in (
            ("does", guide.does),
            ("when to use it", guide.when),
            ("uploaded beside the weights", guide.uploads),
            ("different initialisations", guide.different),
            ("convolutions, residual", f"{guide.convolutions}, {guide.residual}"),
            ("cost on the server", guide.cost),
            ("options", ", ".join(f"{option}={value}" for option, value in defaults.items())),
        ):
            drawn.add_row(what, plain(text.replace("`", "")))
        out.print(drawn)
    out.print("Change an option with --set, e.g. [bold]maecho aggregate … --method ma-echo --set steps=30[/bold]")


def show_ladders(ladders: Sequence[Ladder]) -> None:
    """Print what each further round on real data brings, and what it costs."""
    for one in ladders:
        title = plain(f"From one shot to a round a layer. {one.title}", "bold")
        drawn = Table(title=title, title_justify="left")
        for column in ("rounds", "where real data are asked", "a client uploads", "times the weights", *one.cells):
            drawn.add_column(plain(column), justify="left" if column.startswith("where") else "right")
        for rung in one.rungs:
            drawn.add_row(
                plain(rung.rounds),
                plain(rung.asked),
                size(rung.bytes),
                f"{rung.bytes / one.weights:.1f}",
                *("not run" if accuracy is None else f"{accuracy:.1f} %" for accuracy in rung.accuracies),
            )
        out.print(drawn)


@contextlib.contextmanager
def run_progress(experiment: Experiment, columns: int) -> Iterator[Callable[[Event], None]]:
    """A bar of finished columns on stderr: what runs, and how long it still takes. Gives the function to call for every
    event. Why a column is measured again, or trusted, is printed once."""
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    total, said = len(experiment.cells) * len(experiment.seeds) * columns, set[str]()
    with Progress(*shown, console=stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(escape(printable(experiment.name)), total=total)

        def on_event(event: Event) -> None:
            if event.what in ("again", "trusted"):
                how = "is measured again, since" if event.what == "again" else "is kept as it is, though"
                sentence = f"{event.column} {how} {event.text}"
                if sentence not in said:
                    said.add(sentence)
                    stderr().print(plain(f"{experiment.name}: {sentence}"), soft_wrap=True)
            cell = " ".join(f"{key}={value}" for key, value in event.cell.items())
            words = f"{experiment.name}: {cell} seed={event.seed} {event.column} {event.what}"
            words += f" {event.text}" if event.what == "training" else ""
            bar.update(task, advance=event.finished, description=escape(printable(words)))

        yield on_event


@contextlib.contextmanager
def study_progress(study: Study) -> Iterator[Callable[[int, float, str], None]]:
    """A bar of a study's runs on stderr: what runs, and how long it still takes. Gives the function to call for every
    event. Why a run is repeated, or trusted, is printed."""
    shown = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    with Progress(*shown, console=stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(escape(printable(study.name)), total=len(study.seeds))

        def on_event(seed: int, share: float, text: str) -> None:
            if text.startswith(("is run again", "is kept")):
                stderr().print(plain(f"{study.name}: seed {seed} {text}"), soft_wrap=True)
            words = escape(printable(f"{study.name}: seed {seed} {text}"))
            bar.update(task, completed=study.seeds.index(seed) + share, description=words)

        yield on_event


def show_findings(study: Study, found: Sequence[Finding], path: Path) -> None:
    """Print the numbers of a study."""
    quick = " (quick: small data instead of the paper's)" if study.quick else ""
    say(plain(f"{study.title}{quick}", "bold"))
    drawn = Table()
    drawn.add_column("what was measured")
    for column in ("mean over seeds", "range"):
        drawn.add_column(column, justify="right")
    for one in found:
        drawn.add_row(plain(one.name), short(one.mean), one.range)
    out.print(drawn)
    say("Every run, with its charts, seconds and versions: ", plain(path), whole=True)


def show_results(
    experiment: Experiment, table: Sequence[tuple[Mapping[str, Any], Mapping[str, Figure]]], path: Path
) -> None:
    """Print our mean and range over seeds, with the paper's figure in brackets below. A wide table is printed in parts
    that fit the terminal."""
    quick = " (quick: digits instead of the paper's data)" if experiment.quick else ""
    say(plain(f"{experiment.title}{quick}", "bold"), ": mean over seeds, low–high, [paper], in per cent")
    columns = list(experiment.methods)
    # Long names are broken after commas and hyphens.
    shown = {c: printable(c) for c in columns}
    headings = {c: s if len(s) <= 9 else s.replace(", ", ",\n").replace("-", "-\n") for c, s in shown.items()}
    width = max(9, *(len(line) for heading in headings.values() for line in heading.splitlines()))
    at_once = max(1, (out.width - 28) // (width + 3))
    for first in range(0, len(columns), at_once):
        drawn = Table(show_lines=True)
        for key in experiment.cells[0]:
            drawn.add_column(plain(key))
        for column in columns[first : first + at_once]:
            drawn.add_column(Text(headings[column]), justify="right", no_wrap=True)
        for cell, figures in table:
            drawn.add_row(
                *map(plain, cell.values()), *(_figure(figures.get(c)) for c in columns[first : first + at_once])
            )
        out.print(drawn)
    for note in notes(experiment, table):
        say(plain(note.replace("`", "")))
    say("Every run, with partition, seconds and versions: ", plain(path), whole=True)


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return "not run"
    published = "" if figure.paper is None else f"\n\\[{figure.paper:.1f}]"
    published += "" if figure.current else f"\n[yellow]{figure.marks}[/yellow]"
    return f"{figure.mean:.1f}\n[dim]{figure.low:.1f}–{figure.high:.1f}[/dim]{published}"
