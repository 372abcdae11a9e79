"""Pictures and ladders show all that was measured, and nothing else."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from maecho.errors import InputError
from maecho.lab import experiment
from maecho.lab.experiment import Experiment
from maecho.lab.report import tables
from maecho.lab.report.plots import _apart, against_bytes
from maecho.lab.report.tables import summarise
from support import records

ROOT = Path(__file__).resolve().parents[3]


def measured(config: Experiment, sizes: bool = True) -> dict[str, Any]:
    """Results of all columns, as if they had been run."""
    return records.results(config, lambda k: 20.05 + 3 * k, lambda k: 1000 * (k + 1) if sizes else None)


@pytest.fixture
def config() -> Experiment:
    return Experiment.load("echo-cifar")


def test_a_picture_names_all_that_is_uploaded(config: Experiment, tmp_path: Path) -> None:
    table = summarise(config, measured(config))
    for name in ("a.svg", "new folder/b.svg", "c.png", "d.pdf"):
        against_bytes(config, table, tmp_path / name)
    first = (tmp_path / "a.svg").read_text()
    assert first == (tmp_path / "new folder" / "b.svg").read_text(), "the same each time"
    for column in config.methods:
        assert (f">{column}<" in first) == (column != "local"), column
    assert config.title in first
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_labels_do_not_lie_on_each_other() -> None:
    points = [(1.0, 50.0), (1.0, 50.0), (1.1, 49.0), (9.0, 50.0)]
    places = _apart(points, 1.05)
    beside = sorted(places[:3])
    assert all(above / below <= 1 / 1.05 + 1e-9 for above, below in pairwise(beside))
    assert places[3] == 50, "far away there is room"


def test_a_picture_that_cannot_be(config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = summarise(config, measured(config))
    with pytest.raises(InputError, match=r"a picture must be one of .svg, .png, .pdf, got 'a.gif'"):
        against_bytes(config, table, tmp_path / "a.gif")
    with pytest.raises(InputError, match=r"must say how many bytes were uploaded, got none"):
        against_bytes(config, summarise(config, measured(config, sizes=False)), tmp_path / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"needs matplotlib, got none: pip install 'maecho\[plots\]'"):
        against_bytes(config, table, tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def test_a_ladder_has_a_rung_for_every_column_of_ours(config: Experiment) -> None:
    found = tables.ladder(config, measured(config))
    assert [(rung.name, rung.rounds, rung.asked) for rung in found.rungs] == [
        ("echo-chain", 1, "nowhere"),
        ("echo-chain, 2x weights", 1, "nowhere"),
        ("echo-relay, 2 rounds", 2, "at the head"),
        ("echo-relay, 2 rounds, 2x weights", 2, "at the head"),
        ("echo-relay, 4 rounds", 4, "at the last 3 layers"),
        ("echo-relay", "all", "at every layer"),
    ]
    assert found.weights == 1000
    assert len(found.cells) == len(found.rungs[0].accuracies) == 2


def test_what_was_not_measured_is_left_out(config: Experiment) -> None:
    results = measured(config)
    for run in results["runs"][: len(config.seeds)]:
        del run["columns"]["echo-relay"]
    for run in results["runs"]:
        run["columns"]["echo-chain"] = {**run["columns"]["echo-chain"], "settings": "of old"}
    found = tables.ladder(config, results)
    assert found.rungs[-1].accuracies[0] is None
    assert "echo-chain" not in [rung.name for rung in found.rungs], "measured with other settings"
    few = replace(config, methods={"echo-relay": {"method": "echo-relay"}})
    assert tables.ladder(few, measured(few, sizes=False)).rungs == ()


def test_layers_may_be_named(config: Experiment) -> None:
    named = replace(config, methods={"some": {"method": "echo-relay", "rounds": ["fc1", "fc3"]}})
    (rung,) = tables.ladder(named, measured(named)).rungs
    assert (rung.rounds, rung.asked) == (3, "at fc1, fc3")


def test_without_results_there_is_no_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "CHECKOUT", tmp_path)
    (tmp_path / "results").mkdir()
    assert tables.ladders() == []


def test_the_picture_shows_what_is_committed() -> None:
    config = Experiment.load("echo-bytes")
    picture = (ROOT / "docs" / config.document.picture).read_text()
    assert all(f">{column}<" in picture for column in config.methods)
    results = json.loads((experiment.folder() / "results" / "echo-bytes.json").read_text())
    for _, figures in summarise(config, results):
        assert all(figure.seeds == 3 and figure.current for figure in figures.values())
