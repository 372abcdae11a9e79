"""Two `reproduce` runs on one results file both keep their measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maecho.lab.experiment import Experiment
from maecho.lab.harness.results import results_path
from maecho.lab.harness.runs import Event, reproduce
from maecho.lab.training import LocalTraining

CONFIG = """
title = "Mine"
data = "digits"
network = "digits-mlp"
seeds = [0, 1]

[training]
epochs = 1
learning_rate = 0.05
batch_size = 64

[[cells]]
clients = 2
beta = 0.5
init = "same"

[[cells]]
clients = 2
beta = 0.5
init = "different"

[methods]
local = { method = "local" }
fedavg = { method = "fedavg" }
ensemble = { method = "ensemble" }
"""


def columns(results: dict[str, Any]) -> list[set[str]]:
    return [set(run["columns"]) for run in results["runs"]]


def test_what_another_process_wrote_in_between_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run works between two writes of this run, and finishes a column that this run takes for missing."""
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "cache"))
    experiment = Experiment(
        "tiny", "Tiny", "digits", "digits-mlp", (0,), ({"clients": 2, "beta": 0.5}, {"clients": 3, "beta": 0.5}),
        {"local": {"method": "local"}, "fedavg": {"method": "fedavg"}}, LocalTraining(epochs=1, learning_rate=0.05),
    )  # fmt: skip
    others = []

    def in_between(event: Event) -> None:
        if event.what == "measured" and not others:
            others.append(reproduce(experiment, tmp_path, columns=["fedavg"]))

    results = reproduce(experiment, tmp_path, on_event=in_between, columns=["local"])
    assert columns(others[0]) == [{"local", "fedavg"}, {"fedavg"}]
    assert columns(results) == [{"local", "fedavg"}] * 2
    assert results == json.loads(results_path(experiment, tmp_path).read_text())
    assert list(results["runs"][0]["columns"]) == ["local", "fedavg"]


@pytest.mark.slow
def test_two_processes_keep_their_columns(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CONFIG)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MAECHO_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "maecho", "reproduce", "mine.toml", "--out", ".", "--json", "--columns"]
    running = [
        subprocess.Popen([*command, one], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        for one in ("local", "fedavg", "ensemble")
    ]
    assert [process.wait(300) for process in running] == [0, 0, 0]
    found = json.loads((tmp_path / "mine.json").read_text())
    assert columns(found) == [{"local", "fedavg", "ensemble"}] * 4
