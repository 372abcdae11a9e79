"""How an experiment stands against the paper, in two numbers; and what of the paper something else stands in for."""

from __future__ import annotations

from dataclasses import dataclass

from maecho.lab.columns import NOT_METHODS
from maecho.lab.experiment import Cell, Experiment
from maecho.lab.report.tables import Table, about, published_column, published_rows

NEAR = 6.0
"""Points below the paper that still count as reproduced."""
OF_THE_PAPER = ("average", "fedavg", "ot", "pfnm", "dense", "ma-echo", "ma-echo+ot")
"""Columns of the paper that are one merged model. Its ensembles keep all models."""
NO_MERGED_MODEL = tuple(name for name in NOT_METHODS if name != "echo-relay")
MORE_THAN_ONE_UPLOAD = ("echo-relay", "dense")
"""Methods that ask clients again, or train on the server."""

DATA = {
    "mnist-writers": ("FEMNIST", "MNIST with the NIST writers of its digits"),
    "pacs": ("DomainNet", "PACS, with 4 domains and 7 classes"),
}
"""Data set -> what of the paper it stands in for, and what it is."""
QUICK = ("the paper's data and network", "the digits of scikit-learn and a small network (a quick run)")
BACKBONES = {"mobilenet-v2": ("the paper's pretrained ResNet", "a MobileNetV2 with ImageNet weights")}


@dataclass(frozen=True)
class Far:
    """A figure of MA-Echo that is not near the paper's."""

    cell: Cell
    column: str
    ours: float
    paper: float


@dataclass(frozen=True)
class Share:
    """So many out of so many cells."""

    cells: int
    of: int

    def __str__(self) -> str:
        return f"{self.cells} of {self.of}" if self.of else "the paper has none"


def near(table: Table, experiment: Experiment) -> Share:
    """The figures of MA-Echo that are above the paper's, or less than NEAR points below."""
    published = sum(
        figure.paper is not None and published_column(experiment, column) == "ma-echo"
        for _, figures in table
        for column, figure in figures.items()
    )
    return Share(published - len(far(table, experiment)), published)


def far(table: Table, experiment: Experiment) -> list[Far]:
    """The figures of MA-Echo that are NEAR points below the paper's or more."""
    return [
        Far(cell, column, figure.mean, figure.paper)
        for cell, figures in table
        for column, figure in figures.items()
        if figure.paper is not None and published_column(experiment, column) == "ma-echo"
        if figure.mean < figure.paper - NEAR
    ]


def complete(table: Table, experiment: Experiment) -> Share:
    """How many figures of all cells, seeds and columns are measured."""
    wanted = len(experiment.cells) * len(experiment.seeds) * len(experiment.methods)
    return Share(sum(figure.seeds for _, figures in table for figure in figures.values()), wanted)


def above(table: Table, experiment: Experiment, one_upload: bool = False) -> Share:
    """The cells in which the best merged model of ours is better than the best one of the paper. With `one_upload` only
    what needs neither further rounds nor training on the server."""
    rows = published_rows(experiment)
    wins = []
    for cell, figures in table:
        if all(figure.paper is None for figure in figures.values()):
            continue
        theirs = [
            row[name]
            for row in rows
            if about(experiment, cell, row)
            for name in OF_THE_PAPER
            if row.get(name) is not None
        ]
        ours = [
            figures[column].mean
            for column in figures
            if merges(experiment, column)
            if not (one_upload and experiment.methods[column]["method"] in MORE_THAN_ONE_UPLOAD)
        ]
        if theirs and ours:
            wins.append(max(ours) > max(theirs))
    return Share(sum(wins), len(wins))


def merges(experiment: Experiment, column: str) -> bool:
    """Whether a column is one model, merged from the clients'."""
    return experiment.methods[column]["method"] not in NO_MERGED_MODEL


def stand_ins(experiment: Experiment) -> list[tuple[str, str]]:
    """Pairs: what of the paper is not here, and what stands in for it."""
    if experiment.quick:
        return [QUICK]
    found = [DATA[experiment.data]] if experiment.data in DATA else []
    features = experiment.features
    return [*found, BACKBONES[features.backbone]] if features and features.backbone in BACKBONES else found
