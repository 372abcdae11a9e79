"""The ways in which a config can divide a data set among clients; SPLITS has them by name.

`dirichlet` shares classes out unevenly. `groups` gives whole origins (writers, domains) to clients. `labels` gives each
client the classes that the cell lists for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maecho.errors import InputError
from maecho.lab import partition
from maecho.lab.data import Dataset

Cell = Mapping[str, Any]
Parts = list[np.ndarray]


@dataclass(frozen=True)
class Split:
    """One way to divide the training examples."""

    keys: tuple[str, ...]
    """The entries of a cell that it reads. Cells with equal entries have the same parts."""
    check: Callable[[Cell], bool]
    """Whether these entries make sense."""
    expected: str
    """What makes sense, in words."""
    divide: Callable[[Dataset, Cell, np.random.Generator], Parts]
    """The examples of each client, as indices into the training set."""


def _dirichlet(dataset: Dataset, cell: Cell, rng: np.random.Generator) -> Parts:
    return partition.dirichlet(dataset.y_train.numpy(), cell["clients"], cell["beta"], rng)


def _groups(dataset: Dataset, cell: Cell, rng: np.random.Generator) -> Parts:
    if dataset.groups_train is None:
        raise InputError(f"split: {dataset.name} must say where its examples come from to be split by groups, got none")
    return partition.by_groups(dataset.groups_train.numpy(), cell["clients"], rng)


def _labels(dataset: Dataset, cell: Cell, rng: np.random.Generator) -> Parts:
    return partition.by_labels(dataset.y_train.numpy(), cell["labels"], rng)


def _some_clients(cell: Cell) -> bool:
    clients = cell["clients"]
    return isinstance(clients, int) and not isinstance(clients, bool) and clients >= 1


def _positive_beta(cell: Cell) -> bool:
    return _some_clients(cell) and isinstance(cell["beta"], (int, float)) and 0 < cell["beta"] < math.inf


def _label_sets(cell: Cell) -> bool:
    sets = cell["labels"]
    listed = isinstance(sets, list) and bool(sets) and all(isinstance(one, list) and one for one in sets)
    return listed and all(isinstance(label, int) and label >= 0 for one in sets for label in one)


SPLITS: dict[str, Split] = {
    "dirichlet": Split(("clients", "beta"), _positive_beta, "clients and beta must be positive", _dirichlet),
    "groups": Split(("clients",), _some_clients, "clients must be positive", _groups),
    "labels": Split(("labels",), _label_sets, "labels must list the labels of every client", _labels),
}


def check(name: str, cell: Cell) -> None:
    """Raise ValueError or KeyError unless the cell says what this split needs."""
    if name not in SPLITS:
        raise ValueError(f"split: {name!r}, known are {', '.join(SPLITS)}")
    if not SPLITS[name].check(cell):
        raise ValueError(f"the cell {dict(cell)}: {SPLITS[name].expected}")


def identity(name: str, cell: Cell) -> dict[str, Any]:
    """What decides how the examples are divided, beside the data and the seed."""
    entries = {key: cell[key] for key in SPLITS[name].keys if key in cell}
    return entries if name == "dirichlet" else {"by": name, **entries}
