"""One config of `experiments/`: a table or figure of the paper as data, and what each of its columns asks for."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from maecho.backbones import BACKBONES
from maecho.errors import InputError
from maecho.lab import columns, splits
from maecho.lab.networks import NETWORKS
from maecho.lab.training import LocalTraining

Cell = Mapping[str, Any]

CHECKOUT = Path(__file__).resolve().parents[3] / "experiments"
"""The folder of configs and results in a checkout. An installed package has no such folder."""

TRAINING = tuple(f.name for f in fields(LocalTraining))
"""The entries by which a cell changes its training."""

VIEWS = ("table", "uploads", "ladder", "seconds", "curves")
"""How docs/results.md can show results: a table with a row for each cell, one with a row for each column and its
uploads, the ladder of rounds, the seconds of each method, or accuracies over a method's steps."""
PAPER = {"table", "row", "alias", "where", "cells", "columns", "rows", "missing"}
"""The entries of `Experiment.paper`."""


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
class Features:
    """A frozen backbone between the data and the network."""

    backbone: str
    """A row of BACKBONES."""
    side: int = 224
    """Images are resized to this height and width."""

    def __post_init__(self) -> None:
        if self.backbone not in BACKBONES:
            raise ValueError(f"features: backbone must be among {', '.join(BACKBONES)}, got {self.backbone!r}")
        if not isinstance(self.side, int) or self.side < 1:
            raise ValueError(f"features: side must be a positive whole number, got {self.side!r}")


@dataclass(frozen=True)
class Experiment:
    """One config file."""

    name: str
    title: str
    data: str
    network: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    """What differs from row to row of the table: entries of the split (clients, beta) and of the training (steps), and
    init ("same" or "different")."""
    methods: Mapping[str, Mapping[str, Any]]
    """Column -> method and options."""
    training: LocalTraining = field(default_factory=LocalTraining)
    split: str = "dirichlet"
    """How the examples are divided among clients: a row of SPLITS."""
    features: Features | None = None
    """The frozen backbone whose features are the network's inputs. None: the data themselves."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """Where the paper's figures are in `paper.json`.

    `table`: its key there. `row`: the keys in which a cell must equal a row. `alias`: key -> pairs of our value and the
    paper's, where they differ. `where`: what else the row must say. `cells`: what a cell must say to be in that table
    at all. `columns`: our names of columns -> the paper's, where they differ. `rows`: column -> what the row must say,
    where the paper has a row for our column. `missing`: why cells or columns of the paper are not here.
    """
    document: Document = field(default_factory=Document)
    quick: bool = False

    @classmethod
    def load(cls, name: str, quick: bool = False) -> Experiment:
        """Read a config by its name in `experiments/`, or by path. `quick`: the same on small data."""
        path = find(name)
        raw = read(path)
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
                split=raw.get("split", "dirichlet"),
                features=Features(**raw["features"]) if raw.get("features") else None,
                paper=raw.get("paper", {}),
                document=Document(**{key: _frozen(value) for key, value in raw.get("document", {}).items()}),
                quick=quick,
            )
            experiment._check(raw.keys())
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} must describe an experiment, got a mistake at {error}") from error
        return experiment

    def training_of(self, cell: Cell) -> LocalTraining:
        """The training of a cell's clients: that of the table, with what the cell says otherwise."""
        return replace(self.training, **{key: cell[key] for key in TRAINING if key in cell})

    @staticmethod
    def without_training(cell: Cell) -> Cell:
        """What the cell says beside the training."""
        return {key: value for key, value in cell.items() if key not in TRAINING}

    def columns_in(self, text: str) -> list[str]:
        """The columns that a text lists, separated by commas. The name of a column may hold commas, too."""
        parts, found = [part.strip() for part in text.split(",")], []
        while parts:
            fits = [n for n in range(len(parts), 0, -1) if ", ".join(parts[:n]) in self.methods]
            if not fits:
                raise InputError(f"columns must be among {'; '.join(self.methods)}, got {parts[0]!r}")
            found.append(", ".join(parts[: fits[0]]))
            del parts[: fits[0]]
        return found

    def _check(self, keys: Collection[str]) -> None:
        """Raise ValueError for unknown entries. A misspelt entry would otherwise be ignored, without a word."""
        unknown = sorted(set(keys) - {f.name for f in fields(self)})
        if unknown:
            raise ValueError(f"{unknown[0]!r}, which means nothing here")
        for cell in self.cells:
            self._check_cell(cell)
        unknown = sorted(set(self.paper) - PAPER)
        if unknown:
            raise ValueError(f"paper: {unknown[0]!r}, which means nothing here")
        for column, options in self.methods.items():
            columns.check(column, options)
            if options.get("network", self.network) not in NETWORKS:
                raise ValueError(f"network must be among {', '.join(NETWORKS)}, got {options['network']!r}")

    def _check_cell(self, cell: Cell) -> None:
        splits.check(self.split, cell)
        if cell.get("init", "same") not in ("same", "different"):
            raise ValueError(f"the cell {dict(cell)}: init must be same or different")
        known = (*splits.SPLITS[self.split].keys, "init", *TRAINING)
        unknown = sorted(set(cell) - set(known))
        if unknown:
            raise ValueError(f"the cell {dict(cell)}: {unknown[0]!r}, known are {', '.join(known)}")
        self.training_of(cell)


def _frozen(value: Any) -> Any:
    """A list from TOML as a tuple, which a frozen dataclass needs."""
    return tuple(value) if isinstance(value, list) else value


def folder() -> Path:
    """The folder of the configs: beside the source in a checkout, inside an installed package."""
    return CHECKOUT if CHECKOUT.is_dir() else Path(__file__).resolve().parents[1] / "experiments"


def every_name() -> list[str]:
    """The names of all configs: of tables of accuracies, and of studies."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def names() -> list[str]:
    """The names of the configs that describe tables of accuracies, which `Experiment.load` reads."""
    return [name for name in every_name() if not is_study(name)]


def is_study(name: str) -> bool:
    """Whether a config describes a study, which `Study.load` reads."""
    try:
        return "study" in tomllib.loads(find(name).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError:
        return False


def find(name: str) -> Path:
    path = Path(name) if name.endswith(".toml") else folder() / f"{name}.toml"
    if not path.is_file():
        raise InputError(
            f"experiment must be one of {', '.join(every_name())} or the path of a .toml file, got {name!r}"
        )
    return path


def read(path: Path) -> dict[str, Any]:
    """The content of a config."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} must be a TOML file, got: {error}") from error
