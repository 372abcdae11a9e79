"""`kill -9` in the middle of a run loses at most the column that was measured, and hinders no later run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
title = "Mine"
data = "digits"
network = "digits-mlp"
seeds = [0, 1, 2, 3]
cells = [{ clients = 2, beta = 0.5, init = "same" }, { clients = 3, beta = 0.5, init = "same" }]

[training]
epochs = 2
learning_rate = 0.05
batch_size = 64

[methods]
local = { method = "local" }
fedavg = { method = "fedavg" }
regmean = { method = "regmean" }
"""
COLUMNS = 24


def start(folder: Path, out: str, *more: str) -> subprocess.Popen[bytes]:
    places = {"PYTHONPATH": os.pathsep.join(sys.path), "MAECHO_CACHE": str(folder / "cache")}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "maecho", "reproduce", "mine.toml", "--out", out, "--json", *more]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


def measured(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    if not path.exists():
        return {}
    runs = json.loads(path.read_text())["runs"]
    return {(str(r["cell"]), r["seed"], name): record for r in runs for name, record in r["columns"].items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], dict[str, Any]]:
    """The records of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "mine.toml").write_text(CONFIG)
    assert start(folder, "whole").wait(300) == 0
    return measured(folder / "whole" / "mine.json")


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "moments"), [("1", (1, 13)), ("2", (6,))])
def test_a_killed_run_goes_on_where_it_was(
    tmp_path: Path, whole: dict[tuple[str, int, str], dict[str, Any]], jobs: str, moments: tuple[int, ...]
) -> None:
    """It is killed as soon as there are so many columns."""
    (tmp_path / "mine.toml").write_text(CONFIG)
    path = tmp_path / "killed" / "mine.json"
    known: dict[tuple[str, int, str], dict[str, Any]] = {}
    for enough in moments:
        process = start(tmp_path, "killed", "--jobs", jobs)
        deadline = time.monotonic() + 120
        while len(measured(path)) < enough and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None, "it was to be killed while it ran"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        now = measured(path)
        assert len(now) >= enough
        assert {key: now[key] for key in known} == known, "what was measured before stands as it was"
        known = now
    assert start(tmp_path, "killed", "--jobs", jobs).wait(300) == 0
    last = measured(path)
    assert len(last) == len(whole) == COLUMNS
    assert {key: last[key] for key in known} == known
    for key, record in whole.items():
        assert {k: last[key][k] for k in ("accuracy", "weights", "bytes", "code")} == {
            k: record[k] for k in ("accuracy", "weights", "bytes", "code")
        }
    assert not list(tmp_path.rglob("*.part")), "temporary files of the dead are gone"
