"""Configs: the committed ones find the paper's figures, and reading a config finds its mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maecho import InputError
from maecho.aggregation import MAEcho
from maecho.lab import experiment
from maecho.lab.columns import changes
from maecho.lab.experiment import Experiment
from maecho.lab.report.notes import notes
from maecho.lab.report.tables import published_column, summarise
from maecho.lab.training import LocalTraining
from support import records
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
    "defaults under another name": (
        "ma-echo =",
        '"my method" =',
        "the column 'my method': ma-echo with its defaults must",
    ),
    "another method under a name": (
        '{ method = "ma-echo" }',
        '{ method = "regmean" }',
        "the column 'ma-echo': regmean with its defaults must be called 'regmean'",
    ),
    "options under a plain name": (
        '"ma-echo" }',
        '"ma-echo", steps = 3 }',
        "the column 'ma-echo', which sets steps: only the defaults go by that name",
    ),
    "one round": (
        'ma-echo = { method = "ma-echo" }',
        '"one round" = { method = "echo-relay", rounds = 1 }',
        "rounds must be 2 or more, layers, or 'all', got 1: one round is echo-chain",
    ),
    "misspelt key of the paper": ("[training]", "[paper]\ntabel = 'a'\n[training]", "paper: 'tabel'"),
}


@pytest.mark.parametrize("name", experiment.names())
def test_every_config_finds_the_figures_of_the_paper(name: str) -> None:
    full = Experiment.load(name)
    table = summarise(full, records.results(full))
    assert [cell for cell, _ in table] == list(full.cells)
    published = []
    if full.paper:  # what is past the paper has no figures there
        published = json.loads((experiment.folder() / "paper.json").read_text())[full.paper["table"]]["columns"]
    for cell, figures in table:
        # Table 1 is of one initialisation.
        stands_there = not name.startswith("table-1") or cell["init"] == "same"
        for k, (column, figure) in enumerate(figures.items()):
            assert (figure.mean, figure.seeds) == (k, 3)
            in_paper = stands_there and published_column(full, column) in published
            assert (figure.paper is not None) == in_paper, (cell, column)


def test_a_name_in_the_paper_stands_for_one_column() -> None:
    """The paper's average is class-aware, so its figures do not stand beside the plain one."""
    full = Experiment.load("table-4-mlp")
    found = {column: published_column(full, column) for column in full.methods}
    assert {column: name for column, name in found.items() if name in ("fedavg", "ot", "ensemble")} == {
        "average, class-aware head": "fedavg",
        "ot, class-aware head": "ot",
        "ensemble, class-aware": "ensemble",
    }
    assert found["fedavg"] is found["ot"] is found["ensemble"] is None


@pytest.mark.parametrize("name", experiment.names())
def test_what_is_missing_of_the_paper_has_its_reason(name: str) -> None:
    full = Experiment.load(name)
    found = [line for line in notes(full, summarise(full, records.results(full))) if "are not here" in line]
    assert all(len(line.split("not here: ")[1].split(". ", 1)) == 2 for line in found), "a reason follows"


@pytest.mark.parametrize(
    ("name", "cell", "published"),
    [
        ("table-1", {"clients": 5, "beta": 0.01, "init": "same"}, 80.31),
        ("table-1", {"clients": 20, "beta": 0.1, "init": "same"}, 80.4),
        ("table-2", {"clients": 10, "beta": 0.1, "init": "same"}, 27.13),
        ("table-3-writers", {"clients": 50, "init": "same"}, 82.26),
        ("table-3-domains", {"clients": 8, "init": "same"}, 30.06),
        ("table-4-mlp", {"clients": 2, "beta": 0.01, "init": "different"}, 84.49),
        ("table-4-mlp", {"clients": 2, "beta": 20, "init": "same"}, 96.8),
        ("table-4-cnn", {"clients": 2, "beta": 0.01, "init": "different"}, 41.53),
        ("table-5", {"clients": 5, "beta": 0.01, "init": "same", "steps": 50}, 59.4),
    ],
)
def test_the_figures_are_those_printed(name: str, cell: dict[str, Any], published: float) -> None:
    one = replace(Experiment.load(name), methods={"ma-echo": {"method": "ma-echo"}}, cells=(cell,))
    ((_, figures),) = summarise(one, records.results(one))
    assert figures["ma-echo"].paper == published


def test_a_row_of_the_paper_for_every_column() -> None:
    """Table 6 has a row for every rank, and so do we a column."""
    full = Experiment.load("table-6")
    ((_, figures),) = summarise(full, records.results(full))
    published = [figure.paper for column, figure in figures.items() if column.startswith("ma-echo")]
    assert published == [81.22, 80.64, 80.55, 80.48, 79.65, 76.86]
    assert all(figure.paper is None for column, figure in figures.items() if not column.startswith("ma-echo"))


@pytest.mark.parametrize(("right", "wrong", "part"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_a_config_is_found_when_it_is_read(tmp_path: Path, right: str, wrong: str, part: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG.replace(right, wrong, 1))
    with pytest.raises(InputError) as caught:
        Experiment.load(str(path))
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_an_option_that_equals_its_default_changes_nothing() -> None:
    assert changes({"method": "ma-echo", "steps": MAEcho().steps}) == {}
    assert changes({"method": "ensemble", "by": "probabilities"}) == {}
    assert changes({"method": "echo-relay", "rounds": "all"}) == {}
    assert changes({"method": "ma-echo", "steps": 3, "solver": "iterate"}) == {"steps": 3}
    assert changes({"method": "echo-relay", "rounds": 2}) == {"rounds": 2}
    assert changes({"method": "regmean", "upload": {"rank": 3}}) == {"upload": {"rank": 3}}


def test_a_quick_run_changes_what_it_says_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG.replace("epochs = 1", "epochs = 9\nbatch_size = 7") + "[quick.training]\nepochs = 2\n")
    full, quick = (Experiment.load(str(path), quick=quick) for quick in (False, True))
    assert full.training == LocalTraining(epochs=9, batch_size=7)
    assert quick.training == LocalTraining(epochs=2, batch_size=7)
    assert replace(quick, training=full.training, quick=False) == full


def test_columns_are_named_in_a_list_with_commas() -> None:
    full = Experiment.load("table-1")
    assert full.columns_in("local, ensemble, class-aware,ensemble") == ["local", "ensemble, class-aware", "ensemble"]
    with pytest.raises(InputError, match=r"columns must be among local; .*class-aware; .*, got 'votes'"):
        full.columns_in("local,votes")


def test_an_experiment_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"one of .*table-1.* or the path of a \.toml file, got 'table-99'"):
        Experiment.load("table-99")
