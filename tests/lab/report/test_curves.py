"""Accuracies over a method's steps, and the seconds of the server: means and medians of figures that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maecho.lab.experiment import Experiment
from maecho.lab.report.curves import curves_markdown, panels
from maecho.lab.report.seconds import seconds, seconds_markdown
from support import records


def made(experiment: Experiment, of: dict[tuple[int, int], dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Results with these entries of records, by the place of the cell and the seed."""
    runs = []
    for (cell, seed), columns in of.items():
        measured = {name: records.record(experiment.methods[name], **entries) for name, entries in columns.items()}
        runs.append(records.run(experiment.cells[cell], seed, measured))
    return {"format": 2, "runs": runs, "code": {}}


@pytest.fixture
def figure() -> Experiment:
    found = Experiment.load("figure-3-mlp")
    return replace(found, cells=found.cells[:2], methods={c: found.methods[c] for c in ("ma-echo", "regmean")})


def test_a_curve_is_the_mean_over_seeds_at_steps_that_all_have(figure: Experiment) -> None:
    results = made(
        figure,
        {
            (0, 0): {"ma-echo": {"curve": [[0, 10.0], [5, 40.0]]}, "regmean": {"accuracy": 80.0}},
            (0, 1): {"ma-echo": {"curve": [[0, 30.0], [5, 60.0], [9, 99.0]]}, "regmean": {"accuracy": 90.0}},
            (0, 7): {"ma-echo": {"curve": [[0, 0.0], [5, 0.0]]}, "regmean": {"accuracy": 0.0}},
            (1, 0): {"regmean": {"accuracy": 70.0}},
        },
    )
    first, second = panels(figure, results)
    assert first.curves == {"ma-echo": {0: 20.0, 5: 50.0}}, "seed 7 is none of the config's"
    assert first.levels == {"regmean": 85.0}
    assert (second.curves, second.levels) == ({}, {"regmean": 70.0})
    text = curves_markdown(figure, results)
    assert "| 2 clients, beta 0.01, different init: after step | 0 | 5 |" in text
    assert "| ma-echo | 20.0 | 50.0 |" in text
    assert text.count("Beside them: `regmean` 85.0.") == text.count("Beside them: `regmean` 70.0.") == 1


def test_a_column_without_a_curve_in_one_run_is_a_level(figure: Experiment) -> None:
    results = made(
        figure,
        {(0, 0): {"ma-echo": {"curve": [[0, 10.0]], "accuracy": 20.0}}, (0, 1): {"ma-echo": {"accuracy": 40.0}}},
    )
    (panel,) = panels(figure, results)
    assert (panel.curves, panel.levels) == ({}, {"ma-echo": 30.0})


def test_seconds_are_the_median_of_merging_by_number_of_clients() -> None:
    """The median, since one slow moment of a machine must not count; beside the paper's, where it has some."""
    table = Experiment.load("table-1")

    def took(merging: float) -> dict[str, Any]:
        return {"seconds": {"training": 1e6, "gathering": 1e6, "merging": merging}}

    results = made(
        table,
        {
            (0, 0): {"ma-echo": took(1.0), "local": took(0.0)},
            (1, 0): {"ma-echo": took(2.0)},
            (2, 0): {"ma-echo": took(900.0), "regmean": took(1234.5)},
            (3, 0): {"ma-echo": took(0.25)},
        },
    )
    assert seconds(table, results) == {5: {"ma-echo": 2.0, "regmean": 1234.5}, 10: {"ma-echo": 0.25}}
    lines = seconds_markdown(table, results).splitlines()
    assert lines[0] == "| seconds on the server | 5 clients | 10 clients |"
    assert lines[2].split(" | ")[0] == "| ma-echo"
    assert "2 [1.04]" in lines[2]
    assert "0.25 [1.88]" in lines[2]
    assert "1,23" in lines[3]
    assert len(lines) == 4, "nobody waits for local"
