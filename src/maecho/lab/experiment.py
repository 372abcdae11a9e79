"""One config of `experiments/`: a table or figure of the paper as data, and the table that its results make."""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from maecho.aggregation import EchoChain, choose, gathered_for
from maecho.echo.fit import Regression
from maecho.echo.players import Drawing
from maecho.errors import InputError
from maecho.lab.training import LocalTraining

Cell = Mapping[str, Any]

CHECKOUT = Path(__file__).resolve().parents[3] / "experiments"
"""Where the configs and results are in a checkout; in an installed package there is no such folder."""

NOT_METHODS = ("local", "ensemble", "echo-relay")
"""Columns that need the clients' own models (and data): evaluations of them, and the protocol in many rounds."""


@dataclass(frozen=True)
class Experiment:
    """One config file."""

    name: str
    title: str
    data: str
    network: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    """What differs from run to run: clients, beta, init ("same" or "different")."""
    methods: Mapping[str, Mapping[str, Any]]
    """Column -> method and options."""
    training: LocalTraining = field(default_factory=LocalTraining)
    paper: Mapping[str, Any] = field(default_factory=dict)
    """`table`, the `row` keys that find a cell in it, `where` for what else its rows must say, `cells` for what a cell
    must be to stand in it, and `columns` for what the paper calls ours."""
    quick: bool = False

    @classmethod
    def load(cls, name: str, quick: bool = False) -> Experiment:
        """A config by name from `experiments/`, or by path. `quick`: the same on small data."""
        path = find(name)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} must be a TOML file, got: {error}") from error
        changes = raw.pop("quick", {})
        if quick:
            raw |= {key: value for key, value in changes.items() if key != "training"}
            raw["training"] = raw.get("training", {}) | changes.get("training", {})
        try:
            experiment = cls(
                name=path.stem,
                title=raw["title"],
                data=raw["data"],
                network=raw["network"],
                seeds=tuple(raw["seeds"]),
                cells=tuple(raw["cells"]),
                methods=raw["methods"],
                training=LocalTraining(**raw.get("training", {})),
                paper=raw.get("paper", {}),
                quick=quick,
            )
            experiment._check(raw.keys())
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} must describe an experiment, got a mistake at {error}") from error
        return experiment

    def _check(self, keys: Collection[str]) -> None:
        """A slip of the pen must not run as something else."""
        unknown = sorted(set(keys) - {f.name for f in fields(self)})
        if unknown:
            raise ValueError(f"{unknown[0]!r}, which means nothing here")
        for cell in self.cells:
            if cell["clients"] < 1 or not cell["beta"] > 0 or cell.get("init", "same") not in ("same", "different"):
                raise ValueError(f"the cell {cell}: clients and beta must be positive, init same or different")
        for options in self.methods.values():
            if options["method"] == "echo-relay":
                protocol(options)
            elif options["method"] not in NOT_METHODS:
                choose(**plain(options))
            elif options.get("by", "probabilities") not in ("logits", "probabilities", "class-aware"):
                raise ValueError(f"by must be logits, probabilities or class-aware, got {options['by']!r}")
            unknown = sorted(set(options.get("upload", {})) - {"rank", "gaussians", "covariance", "labels"})
            if unknown:
                raise ValueError(f"upload may say rank, gaussians, covariance and labels, got {unknown[0]!r}")


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """A column's method and its options; `upload`, how its uploads are made, is the harness's own."""
    return {key: value for key, value in options.items() if key != "upload"}


def protocol(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `relay` for a column of echo-relay: its rounds, and options of Regression and Drawing."""
    given = {key: value for key, value in plain(options).items() if key not in ("method", "rounds")}
    of_drawing = {f.name for f in fields(Drawing)}
    return {
        "rounds": options.get("rounds", "all"),
        "regression": Regression(**{key: value for key, value in given.items() if key not in of_drawing}),
        "drawing": Drawing(**{key: value for key, value in given.items() if key in of_drawing}),
    }


def drawn_by(options: Mapping[str, Any]) -> str | None:
    """How a column fits stages at drawn inputs: columns of which this is the same share them. None if it has none."""
    if options["method"] == "echo-chain":
        found = choose(**plain(options))[1]
        assert isinstance(found, EchoChain)
        return repr((*found.parts(), options.get("upload")))
    if options["method"] != "echo-relay" or options.get("rounds", "all") == "all":
        return None
    arguments = protocol(options)
    return repr((arguments["regression"], arguments["drawing"], options.get("upload")))


def gathered(options: Mapping[str, Any]) -> frozenset[str]:
    """The statistics that a column's uploads must carry."""
    if options["method"] == "echo-relay":
        drawing = protocol(options)["drawing"]
        return drawing.needs | drawing.uses if options.get("rounds", "all") != "all" else frozenset()
    return frozenset() if options["method"] in NOT_METHODS else gathered_for(choose(**plain(options))[1])


def settings(options: Mapping[str, Any]) -> str:
    """A column's method with its defaults filled in, so that a changed default is not taken for the old one."""
    if options["method"] == "echo-relay":
        arguments = protocol(options)
        if arguments["rounds"] == "all":
            del arguments["drawing"]  # nothing is drawn
        found = repr(arguments)
    else:
        found = repr(plain(options) if options["method"] in NOT_METHODS else choose(**plain(options))[1])
    return f"{found}, upload {dict(options['upload'])}" if "upload" in options else found


def folder() -> Path:
    """Where the configs are: beside the source in a checkout, inside the package when installed from a wheel."""
    return CHECKOUT if CHECKOUT.is_dir() else Path(__file__).resolve().parents[1] / "experiments"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def find(name: str) -> Path:
    path = Path(name) if name.endswith(".toml") else folder() / f"{name}.toml"
    if not path.is_file():
        raise InputError(f"experiment must be one of {', '.join(names())} or the path of a .toml file, got {name!r}")
    return path


def results_path(experiment: Experiment, out: Path | None = None) -> Path:
    """By default beside the configs of a checkout, otherwise in the current folder."""
    if out is None:
        # Never into an installed package: what it holds is the package's, and an upgrade would take the results along.
        out = CHECKOUT / "results" if CHECKOUT.is_dir() else Path("maecho-results")
    return out / f"{experiment.name}{'-quick' if experiment.quick else ''}.json"


@dataclass(frozen=True)
class Figure:
    """One column of one cell over seeds, and what the paper says."""

    mean: float
    low: float
    high: float
    seeds: int
    paper: float | None
    bytes: float | None
    """What the client uploads that uploads most; None if that was not counted."""
    current: bool = True
    """Measured with the settings that the config has now."""


def summarise(experiment: Experiment, results: Mapping[str, Any]) -> list[tuple[Cell, dict[str, Figure]]]:
    """Mean and spread over seeds for every cell that has runs."""
    published = json.loads((folder() / "paper.json").read_text(encoding="utf-8")) if experiment.paper else {}
    rows = published[experiment.paper["table"]]["rows"] if experiment.paper and not experiment.quick else []
    table = []
    for cell in experiment.cells:
        runs = [run for run in results["runs"] if run["cell"] == cell]
        if not runs:
            continue
        fixed = {**{key: cell[key] for key in experiment.paper.get("row", ())}, **experiment.paper.get("where", {})}
        row: dict[str, Any] = next((r for r in rows if all(_same(r.get(k), v) for k, v in fixed.items())), {})
        if any(cell[key] != value for key, value in experiment.paper.get("cells", {}).items()):
            row = {}
        figures = {}
        aliases = experiment.paper.get("columns", {})
        for column in experiment.methods:
            found = [run["columns"][column] for run in runs if column in run["columns"]]
            if not found:
                continue  # a column that was added since and not run yet
            values, sizes = [one["accuracy"] for one in found], [one.get("bytes") for one in found]
            figures[column] = Figure(
                statistics.fmean(values),
                min(values),
                max(values),
                len(values),
                row.get(aliases.get(column, column)),
                None if None in sizes else statistics.fmean(sizes),
                all(one.get("settings") == settings(experiment.methods[column]) for one in found),
            )
        table.append((cell, figures))
    return table


def _same(published: Any, ours: Any) -> bool:
    """Table 4 writes "diff" for what we call different."""
    return published == ours or (published, ours) == ("diff", "different")


def markdown(experiment: Experiment, table: list[tuple[Cell, dict[str, Figure]]]) -> str:
    """The table for a document: mean over seeds, ± half the range, and the paper's figure in brackets; † if it was
    measured with other settings than it has now. Columns that were never run are left out."""
    keys = list(experiment.cells[0])
    columns = [column for column in experiment.methods if any(column in figures for _, figures in table)]
    lines = ["| " + " | ".join([*keys, *columns]) + " |", "|" + "---|" * (len(keys) + len(columns))]
    for cell, figures in table:
        texts = []
        for column in columns:
            if column not in figures:
                texts.append("")
                continue
            figure = figures[column]
            published = "" if figure.paper is None else f" [{figure.paper:.1f}]"
            mark = "" if figure.current else "†"
            texts.append(f"{figure.mean:.1f} ± {(figure.high - figure.low) / 2:.1f}{mark}{published}")
        lines.append("| " + " | ".join([*(str(cell[key]) for key in keys), *texts]) + " |")
    return "\n".join(lines)
