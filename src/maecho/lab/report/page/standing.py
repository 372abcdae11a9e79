"""How an experiment stands against the paper, in two numbers; and what of the paper something else stands in for."""

from __future__ import annotations

from dataclasses import dataclass

from maecho.lab.columns import NOT_METHODS
from maecho.lab.experiment import Experiment
from maecho.lab.report.drawing.markup import Markup, element
from maecho.lab.report.tables import Table, about, published_column, published_rows

NEAR = 6.0
"""Points below the paper that still count as reproduced."""
OF_THE_PAPER = ("average", "fedavg", "ot", "pfnm", "dense", "ma-echo", "ma-echo+ot")
"""Columns of the paper that are one merged model. Its ensembles keep all models."""
NO_MERGED_MODEL = tuple(name for name in NOT_METHODS if name != "echo-relay")

DATA = {
    "mnist-writers": ("FEMNIST", "MNIST with the NIST writers of its digits"),
    "pacs": ("DomainNet", "PACS, with 4 domains and 7 classes"),
}
"""Data set -> what of the paper it stands in for, and what it is."""
QUICK = ("the paper's data and network", "the digits of scikit-learn and a small network (a quick run)")
BACKBONES = {"mobilenet-v2": ("the paper's pretrained ResNet", "a MobileNetV2 with ImageNet weights")}


@dataclass(frozen=True)
class Share:
    """So many out of so many cells."""

    cells: int
    of: int

    def __str__(self) -> str:
        return f"{self.cells} of {self.of}" if self.of else "the paper has none"


def near(table: Table, experiment: Experiment) -> Share:
    """The figures of MA-Echo that are above the paper's, or less than NEAR points below."""
    figures = [
        figure
        for _, row in table
        for column, figure in row.items()
        if figure.paper is not None and published_column(experiment, column) == "ma-echo"
    ]
    good = sum(figure.mean >= figure.paper - NEAR for figure in figures if figure.paper is not None)
    return Share(good, len(figures))


def above(table: Table, experiment: Experiment) -> Share:
    """The cells in which the best merged model of ours is better than the best one of the paper."""
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
        ours = [figures[column].mean for column in figures if merges(experiment, column)]
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


def stand_in(paper: str, here: str) -> Markup:
    """The sentence that stands wherever a number comes from something else than in the paper."""
    return element("p", element("strong", "Stand-in. "), f"In place of {paper}: {here}.", class_="stand-in")
