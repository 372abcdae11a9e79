"""One config of `experiments/`: a table or figure of the paper as data, and what each of its columns asks for."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from maecho.aggregation import METHODS, EchoChain, choose, gathered_for
from maecho.echo.fit import Regression
from maecho.echo.simulated import Drawing
from maecho.errors import InputError
from maecho.lab.training import LocalTraining

Cell = Mapping[str, Any]

CHECKOUT = Path(__file__).resolve().parents[3] / "experiments"
"""The folder of configs and results in a checkout. An installed package has no such folder."""

NOT_METHODS = ("local", "pooled", "ensemble", "echo-relay")
"""Columns that are not in METHODS, since they need the clients' own models, and some of them the clients' data."""
SPLIT = ("clients", "beta")
"""The keys of a cell that say how the examples are divided among clients."""

VIEWS = ("table", "uploads", "ladder")
"""How docs/results.md can show results: a table with a row for each cell, one with a row for each column and its
uploads, or the ladder of rounds."""


@dataclass(frozen=True)
class Document:
    """What docs/results.md says about an experiment."""

    heading: str = ""
    """By default the title of the experiment."""
    text: str = ""
    """Markdown that stands before the tables."""
    order: int = 100
    """Experiments are sorted by this number, then by name."""
    shows: tuple[str, ...] = ("table",)
    """A selection of VIEWS."""
    picture: str = ""
    """A file in docs/ that `maecho reproduce NAME --show --picture FILE` has drawn."""

    def __post_init__(self) -> None:
        for view in self.shows:
            if view not in VIEWS:
                raise ValueError(f"document: shows must be among {', '.join(VIEWS)}, got {view!r}")


@dataclass(frozen=True)
class Experiment:
    """One config file."""

    name: str
    title: str
    data: str
    network: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    """What differs from row to row of the table: clients, beta, init ("same" or "different")."""
    methods: Mapping[str, Mapping[str, Any]]
    """Column -> method and options."""
    training: LocalTraining = field(default_factory=LocalTraining)
    paper: Mapping[str, Any] = field(default_factory=dict)
    """Where the paper's figures are in `paper.json`.

    `table`: its key there. `row`: the keys in which a cell must equal a row. `where`: what else the row must say.
    `cells`: what a cell must say to be in that table at all. `columns`: our names of columns -> the paper's, where they
    differ. `missing`: why cells or columns of the paper are not here.
    """
    document: Document = field(default_factory=Document)
    quick: bool = False

    @classmethod
    def load(cls, name: str, quick: bool = False) -> Experiment:
        """Read a config by its name in `experiments/`, or by path. `quick`: the same on small data."""
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
                document=Document(**{key: _frozen(value) for key, value in raw.get("document", {}).items()}),
                quick=quick,
            )
            experiment._check(raw.keys())
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} must describe an experiment, got a mistake at {error}") from error
        return experiment

    def columns_in(self, text: str) -> list[str]:
        """The columns in a list with commas. A column's own name may hold commas too."""
        parts, found = [part.strip() for part in text.split(",")], []
        while parts:
            fits = [n for n in range(len(parts), 0, -1) if ", ".join(parts[:n]) in self.methods]
            if not fits:
                raise InputError(f"columns must be among {'; '.join(self.methods)}, got {parts[0]!r}")
            found.append(", ".join(parts[: fits[0]]))
            del parts[: fits[0]]
        return found

    def _check(self, keys: Collection[str]) -> None:
        """Refuse what is misspelt, so that it does not run as something else."""
        unknown = sorted(set(keys) - {f.name for f in fields(self)})
        if unknown:
            raise ValueError(f"{unknown[0]!r}, which means nothing here")
        for cell in self.cells:
            if cell["clients"] < 1 or not cell["beta"] > 0 or cell.get("init", "same") not in ("same", "different"):
                raise ValueError(f"the cell {cell}: clients and beta must be positive, init same or different")
        unknown = sorted(set(self.paper) - {"table", "row", "where", "cells", "columns", "missing"})
        if unknown:
            raise ValueError(f"paper: {unknown[0]!r}, which means nothing here")
        for column, options in self.methods.items():
            _check_name(column, options)
            if options["method"] == "echo-relay":
                protocol(options, 0)
            elif options["method"] not in NOT_METHODS:
                choose(**plain(options))
            elif options.get("by", "probabilities") not in ("logits", "probabilities", "class-aware"):
                raise ValueError(f"by must be logits, probabilities or class-aware, got {options['by']!r}")
            unknown = sorted(set(options.get("upload", {})) - {"rank", "gaussians", "covariance", "labels"})
            if unknown:
                raise ValueError(f"upload may say rank, gaussians, covariance and labels, got {unknown[0]!r}")


def _check_name(column: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless the column's name fits: a method's own name is only for its defaults, and a column that
    changes an option must have another name."""
    method = options["method"]
    if changes(options):
        if column in (*METHODS, *NOT_METHODS):
            listed = ", ".join(changes(options))
            raise ValueError(f"the column {column!r}, which sets {listed}: only the defaults go by that name")
    elif column != method:
        raise ValueError(f"the column {column!r}: {method} with its defaults must be called {method!r}")


def changes(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a column sets to another value than the default."""
    plain_settings = settings({"method": options["method"]})
    return {
        key: value
        for key, value in options.items()
        if key == "upload"
        or (key != "method" and settings({"method": options["method"], key: value}) != plain_settings)
    }


def split_of(cell: Cell) -> dict[str, Any]:
    """The entries of a cell that say how the examples are divided."""
    return {key: cell[key] for key in SPLIT if key in cell}


def _frozen(value: Any) -> Any:
    """A list from TOML as a tuple, which a frozen dataclass needs."""
    return tuple(value) if isinstance(value, list) else value


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """A column's method and its options, without the entry `upload`, which says how its uploads are made."""
    return {key: value for key, value in options.items() if key != "upload"}


def protocol(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The arguments of `relay` for a column of echo-relay: its rounds, its Regression, and, unless real data are asked
    at every layer, its Drawing, with this seed if the column sets none."""
    given = {key: value for key, value in plain(options).items() if key not in ("method", "rounds")}
    rounds = options.get("rounds", "all")
    of_drawing = {f.name: given.pop(f.name) for f in fields(Drawing) if f.name in given}
    found = {"rounds": rounds, "regression": Regression(**given)}
    if rounds != "all":
        return {**found, "drawing": Drawing(**{"seed": seed, **of_drawing})}
    if of_drawing:
        raise ValueError(f"{next(iter(of_drawing))!r}: with rounds='all' no inputs are drawn")
    return found


def drawn_by(options: Mapping[str, Any]) -> str | None:
    """A text of everything that decides how a column fits stages at drawn inputs. Columns with equal texts share these
    stages.

    None if the column has no such stages.
    """
    if options["method"] == "echo-chain":
        found = choose(**plain(options))[1]
        assert isinstance(found, EchoChain)
        return repr((*found.parts(), options.get("upload")))
    if options["method"] != "echo-relay" or options.get("rounds", "all") == "all":
        return None
    arguments = protocol(options, Drawing.seed)
    return repr((arguments["regression"], arguments["drawing"], options.get("upload")))


def gathered(options: Mapping[str, Any]) -> frozenset[str]:
    """The statistics that a column's uploads must carry."""
    if options["method"] == "echo-relay":
        drawing = protocol(options, Drawing.seed).get("drawing")
        return frozenset() if drawing is None else drawing.needs | drawing.uses
    return frozenset() if options["method"] in NOT_METHODS else gathered_for(choose(**plain(options))[1])


def settings(options: Mapping[str, Any]) -> str:
    """A column's method with its defaults filled in. So a changed default counts as another setting.

    The seed of a method that draws is that of the run, unless the column sets it, so it shows as the default.
    """
    if options["method"] == "echo-relay":
        found = repr(protocol(options, Drawing.seed))
    elif options["method"] == "ensemble":
        found = repr({"method": "ensemble", "by": "probabilities", **plain(options)})
    else:
        found = repr(plain(options) if options["method"] in NOT_METHODS else choose(**plain(options))[1])
    return f"{found}, upload {dict(options['upload'])}" if "upload" in options else found


def folder() -> Path:
    """The folder of the configs: beside the source in a checkout, inside an installed package."""
    return CHECKOUT if CHECKOUT.is_dir() else Path(__file__).resolve().parents[1] / "experiments"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def find(name: str) -> Path:
    path = Path(name) if name.endswith(".toml") else folder() / f"{name}.toml"
    if not path.is_file():
        raise InputError(f"experiment must be one of {', '.join(names())} or the path of a .toml file, got {name!r}")
    return path
