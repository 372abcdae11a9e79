"""Tables on results whose means, spreads and sizes are known beforehand: each wrong reading would give another text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from maecho.lab.experiment import Cell, Experiment
from maecho.lab.report.notes import notes
from maecho.lab.report.tables import ladder, ladder_markdown, markdown, summarise, upload_markdown
from support import records

FEW, MANY, OTHER = ({"clients": n, "beta": beta, "init": "same"} for n, beta in ((2, 0.1), (5, 0.5), (9, 0.5)))
SEEDS = (0, 1, 2)
METHODS: Mapping[str, dict[str, Any]] = {
    "local": {"method": "local"},
    "echo-chain": {"method": "echo-chain"},
    "two rounds": {"method": "echo-relay", "rounds": 2},
    "the first layer": {"method": "echo-relay", "rounds": ["fc1"]},
    "echo-relay": {"method": "echo-relay"},
}
ACCURACIES = {
    # Mean, median and the middle of the range are three numbers.
    (2, "local"): (10.0, 20.0, 60.0),
    (2, "echo-chain"): (50.0, 50.0, 80.0),
    (2, "two rounds"): (71.0, 71.0, 71.0),
    (2, "the first layer"): (72.0, 72.0, 72.0),
    (2, "echo-relay"): (73.0, 73.0, 73.0),
    (5, "local"): (1.0, 2.0, 3.0),
    (5, "echo-chain"): (7.0, 8.0, 9.0),
    (5, "two rounds"): (31.0, 31.0, 31.0),
    (5, "the first layer"): (32.0, 32.0, 32.0),
    (5, "echo-relay"): (33.0, 33.0, 33.0),
}
MEGABYTES = {
    "local": (0, 0),
    "echo-chain": (3, 4),
    "two rounds": (6, 5),
    "the first layer": (7, 7),
    "echo-relay": (9, 8),
}
"""In the first and in the second cell; the largest of both is shown."""


@pytest.fixture
def config() -> Experiment:
    return Experiment("mine", "Mine", "digits", "digits-mlp", SEEDS, (FEW, MANY), METHODS)


@pytest.fixture
def results() -> dict[str, Any]:
    """Three seeds of two cells, and runs that the config has no longer: of another cell, and of another seed."""
    runs = [run_of(cell, seed, place) for place, cell in enumerate((FEW, MANY)) for seed in SEEDS]
    for cell, seed in ((OTHER, 0), (FEW, 7)):
        columns = {name: records.record(options, 99.0, bytes=99_000_000) for name, options in METHODS.items()}
        runs.append(records.run(cell, seed, columns, 2_000_000))
    return {"format": 2, "runs": runs, "code": {}}


def run_of(cell: Cell, seed: int, place: int) -> dict[str, Any]:
    columns = {
        name: records.record(
            options,
            ACCURACIES[cell["clients"], name][seed],
            bytes=1_000_000 * (MEGABYTES[name][place] + seed - 1) if name != "local" else 0,
        )
        for name, options in METHODS.items()
    }
    return records.run(cell, seed, columns, 2_000_000)


def test_a_figure_is_the_mean_over_seeds_and_half_the_range(config: Experiment, results: dict[str, Any]) -> None:
    assert markdown(config, summarise(config, results)).splitlines() == [
        "| clients | beta | init | local | echo-chain | two rounds | the first layer | echo-relay |",
        "|---|---|---|---|---|---|---|---|",
        "| 2 | 0.1 | same | 30.0 ± 25.0 | 60.0 ± 15.0 | 71.0 ± 0.0 | 72.0 ± 0.0 | 73.0 ± 0.0 |",
        "| 5 | 0.5 | same | 2.0 ± 1.0 | 8.0 ± 1.0 | 31.0 ± 0.0 | 32.0 ± 0.0 | 33.0 ± 0.0 |",
    ]


def test_an_upload_is_the_mean_over_seeds_of_the_cell_that_sends_most(
    config: Experiment, results: dict[str, Any]
) -> None:
    assert upload_markdown(config, summarise(config, results)).splitlines()[2:] == [
        "| local | 0 bytes | 30.0 ± 25.0 | 2.0 ± 1.0 |",
        "| echo-chain | 4.0 MB | 60.0 ± 15.0 | 8.0 ± 1.0 |",
        "| two rounds | 6.0 MB | 71.0 ± 0.0 | 31.0 ± 0.0 |",
        "| the first layer | 7.0 MB | 72.0 ± 0.0 | 32.0 ± 0.0 |",
        "| echo-relay | 9.0 MB | 73.0 ± 0.0 | 33.0 ± 0.0 |",
    ]


def test_a_ladder_has_a_rung_for_every_number_of_rounds(config: Experiment, results: dict[str, Any]) -> None:
    assert ladder_markdown(ladder(config, results)).splitlines() == [
        "| column | rounds | real data asked | a client uploads | times the weights "
        "| 2 clients, beta 0.1, same init | 5 clients, beta 0.5, same init |",
        "|---|---|---|---|---|---|---|",
        "| echo-chain | 1 | nowhere | 4.0 MB | 2.0 | 60.0 | 8.0 |",
        "| two rounds | 2 | at the head | 6.0 MB | 3.0 | 71.0 | 31.0 |",
        "| the first layer | 2 | at fc1 | 7.0 MB | 3.5 | 72.0 | 32.0 |",
        "| echo-relay | all | at every layer | 9.0 MB | 4.5 | 73.0 | 33.0 |",
    ]


def test_one_seed_with_other_settings_marks_the_figure(config: Experiment, results: dict[str, Any]) -> None:
    results["runs"][1]["columns"]["local"]["settings"] = "others"
    results["runs"][4]["columns"]["echo-chain"]["clients"] = "others"
    found = {(cell["clients"], name): f.marks for cell, row in summarise(config, results) for name, f in row.items()}
    assert {key: marks for key, marks in found.items() if marks} == {(2, "local"): "†", (5, "echo-chain"): "‡"}


def test_notes_explain_settings_marks_and_older_recipes(config: Experiment, results: dict[str, Any]) -> None:
    expected = [
        "Settings: `two rounds` is `echo-relay` with rounds = 2; `the first layer` is `echo-relay` with rounds = "
        "['fc1']; `echo-chain` has the defaults."
    ]
    assert notes(config, summarise(config, results)) == expected
    results["runs"][1]["columns"]["local"]["settings"] = "others"
    results["runs"][4]["columns"]["echo-chain"] |= {"clients": "others", "recipe": "made long ago"}
    assert notes(config, summarise(config, results)) == [
        *expected,
        "† measured with other settings than the config has now.",
        "‡ measured on other clients than the rest of its cell.",
        "These figures were made by an older recipe: `echo-chain` (made long ago).",
    ]
