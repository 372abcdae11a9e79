"""Configs: the committed ones find the paper's figures, and reading a config finds its mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maecho import InputError
from maecho.lab import experiment
from maecho.lab.experiment import Experiment
from maecho.lab.tables import summarise
from support.configs import CONFIG

MISTAKES = {
    "no TOML": ('title = "Mine"', "title: Mine", "TOML"),
    "no title": ("title", "titel", "title"),
    "cell without clients": ("clients = 2, ", "", "clients"),
    "unknown initialisation": ('"same"', '"sane"', "sane"),
    "unknown setting": ("epochs", "epoch", "epoch"),
    "bad setting": ("epochs = 1", "epochs = 0", "at least 1, got 0"),
    "misspelt section": ("[training]", "[trainings]", "trainings"),
    "no method": ('{ method = "ma-echo" }', "{ steps = 3 }", "method"),
    "unknown method": ('"ma-echo"', '"ma-ecco"', "ma-ecco"),
    "bad option": ('"ma-echo" }', '"ma-echo", steps = -1 }', "at least 0, got -1"),
    "draws where none are": (
        '"ma-echo" }',
        '"echo-relay", draws = 3 }',
        "'draws': with rounds='all' no inputs are drawn",
    ),
    "bad ensemble": ('"logits"', '"votes"', "votes"),
}


@pytest.mark.parametrize("name", experiment.names())
def test_every_config_finds_the_figures_of_the_paper(name: str) -> None:
    full = Experiment.load(name)
    columns = {column: {"accuracy": float(i)} for i, column in enumerate(full.methods)}
    runs = [{"cell": cell, "seed": seed, "columns": columns} for cell in full.cells for seed in (0, 1)]
    table = summarise(full, {"runs": runs})
    assert [cell for cell, _ in table] == list(full.cells)
    published = []
    if full.paper:  # what is past the paper has no figures there
        published = json.loads((experiment.folder() / "paper.json").read_text())[full.paper["table"]]["columns"]
    aliases = full.paper.get("columns", {})
    for cell, figures in table:
        stands_there = name.startswith("table-4") or cell["init"] == "same"  # Table 1 is of one initialisation
        for column, figure in figures.items():
            assert (figure.mean, figure.seeds) == (columns[column]["accuracy"], 2)
            assert (figure.paper is not None) == (stands_there and aliases.get(column, column) in published), (
                cell,
                column,
            )


@pytest.mark.parametrize(
    ("name", "cell", "published"),
    [
        ("table-1", {"clients": 5, "beta": 0.01, "init": "same"}, 80.31),
        ("table-4-mlp", {"clients": 2, "beta": 0.01, "init": "different"}, 84.49),
    ],
)
def test_the_figures_are_those_printed(name: str, cell: dict[str, Any], published: float) -> None:
    one = replace(Experiment.load(name), methods={"ma-echo": {"method": "ma-echo"}}, cells=(cell,))
    run = {"cell": cell, "seed": 0, "columns": {"ma-echo": {"accuracy": 50.0}}}
    ((_, figures),) = summarise(one, {"runs": [run]})
    assert figures["ma-echo"].paper == published


@pytest.mark.parametrize(("right", "wrong", "part"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_a_config_is_found_when_it_is_read(tmp_path: Path, right: str, wrong: str, part: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG.replace(right, wrong, 1))
    with pytest.raises(InputError) as caught:
        Experiment.load(str(path))
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_an_experiment_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"one of .*table-1.* or the path of a \.toml file, got 'table-99'"):
        Experiment.load("table-99")
