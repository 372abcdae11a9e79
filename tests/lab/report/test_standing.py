"""How an experiment stands against the paper, on figures whose answer is known; and what stands in for what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maecho.lab.experiment import Experiment
from maecho.lab.report.standing import Share, above, complete, far, near, stand_ins
from maecho.lab.report.tables import summarise
from support import records

PAPER = {(5, 0.01): 80.31, (5, 0.1): 74.26, (5, 0.5): 78.34}
"""MA-Echo in Table 1, which is the paper's best merged model in these cells; its ensembles reach 75.65."""


@pytest.fixture
def experiment() -> Experiment:
    found = Experiment.load("table-1")
    columns = ("local", "ma-echo", "ensemble, class-aware", "pooled", "regmean")
    return replace(found, cells=found.cells[:3], seeds=(0,), methods={c: found.methods[c] for c in columns})


def measured(experiment: Experiment, ma_echo: tuple[float, ...], regmean: tuple[float, ...]) -> dict[str, Any]:
    runs = []
    for i, cell in enumerate(experiment.cells):
        said = {"ma-echo": ma_echo[i], "regmean": regmean[i]}
        columns = {name: records.record(options, said.get(name, 99.0)) for name, options in experiment.methods.items()}
        runs.append(records.run(cell, 0, columns))
    return {"format": 2, "runs": runs, "code": {}}


@pytest.mark.parametrize(
    ("ma_echo", "regmean", "close", "better"),
    [
        ((80.31, 74.26, 78.34), (0, 0, 0), 3, 0),
        ((74.32, 68.25, 99.0), (0, 0, 0), 2, 1),
        ((0, 0, 0), (80.32, 74.27, 78.33), 0, 2),
    ],
)
def test_cells_are_counted(
    experiment: Experiment, ma_echo: tuple[float, ...], regmean: tuple[float, ...], close: int, better: int
) -> None:
    """Neither a client's own model nor an ensemble nor pooled data count as merged."""
    table = summarise(experiment, measured(experiment, ma_echo, regmean))
    assert [figures["ma-echo"].paper for _, figures in table] == list(PAPER.values())
    assert near(table, experiment) == Share(close, 3)
    assert len(far(table, experiment)) == 3 - close
    assert complete(table, experiment) == Share(15, 15)
    assert above(table, experiment) == Share(better, 3)


def test_from_one_upload_neither_relay_nor_dense_counts(experiment: Experiment) -> None:
    full = Experiment.load("table-1")
    columns = ("ma-echo", "echo-relay", "dense", "echo-chain")
    other = replace(experiment, methods={c: full.methods[c] for c in columns})

    def counted(**said: float) -> tuple[Share, Share]:
        runs = [
            records.run(
                cell, 0, {n: records.record(o, said.get(n.replace("-", "_"), 0)) for n, o in other.methods.items()}
            )
            for cell in other.cells
        ]
        table = summarise(other, {"format": 2, "runs": runs, "code": {}})
        return above(table, other), above(table, other, one_upload=True)

    assert counted(echo_relay=99) == (Share(3, 3), Share(0, 3))
    assert counted(dense=99) == (Share(3, 3), Share(0, 3))
    assert counted(echo_chain=99) == (Share(3, 3), Share(3, 3))


def test_a_cell_that_is_far_is_named(experiment: Experiment) -> None:
    (one,) = far(summarise(experiment, measured(experiment, (74.32, 68.25, 99.0), (0, 0, 0))), experiment)
    assert (one.cell["beta"], one.column, one.ours, one.paper) == (0.1, "ma-echo", 68.25, 74.26)


def test_what_the_paper_has_not_is_not_counted(experiment: Experiment) -> None:
    other = replace(experiment, paper={})
    table = summarise(other, measured(other, (1, 1, 1), (1, 1, 1)))
    assert str(near(table, other)) == str(above(table, other)) == "the paper has none"
    assert str(Share(1, 2)) == "1 of 2"
    assert complete([], other) == Share(0, 15)


def test_every_stand_in_is_named() -> None:
    said = {
        name: stand_ins(Experiment.load(name)) for name in ("table-1", "table-2", "table-3-writers", "table-3-domains")
    }
    assert said["table-1"] == []
    assert [paper for paper, _ in said["table-2"]] == ["the paper's pretrained ResNet"]
    assert said["table-3-writers"] == [("FEMNIST", "MNIST with the NIST writers of its digits")]
    assert [paper for paper, _ in said["table-3-domains"]] == ["DomainNet", "the paper's pretrained ResNet"]
    assert [paper for paper, _ in stand_ins(Experiment.load("table-1", quick=True))] == ["the paper's data and network"]
