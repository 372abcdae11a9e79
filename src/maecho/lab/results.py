"""The file of an experiment's results: where it is, how it is read, and how a finished run gets into it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from maecho import disk
from maecho.errors import InputError
from maecho.lab import experiment as configs
from maecho.lab.clients import made_of
from maecho.lab.experiment import Experiment

Run = dict[str, Any]
"""One cell with one seed: its columns, and how they were made."""


def results_path(experiment: Experiment, out: Path | None = None) -> Path:
    """Where the results are; by default beside the configs of a checkout, otherwise in the current folder."""
    if out is None:
        # An installed package is never written to: an upgrade would take the results along.
        out = configs.CHECKOUT / "results" if configs.CHECKOUT.is_dir() else Path("maecho-results")
    return out / f"{experiment.name}{'-quick' if experiment.quick else ''}.json"


def read_results(path: Path, experiment: Experiment) -> dict[str, Any]:
    """The results of the clients that the config describes now; without a file there are none."""
    return _content(experiment, _read(path, experiment)[0])


def add_run(path: Path, experiment: Experiment, run: Run, done: Collection[str]) -> dict[str, Any]:
    """Put a finished run into the file; the results as of now.

    `done` are the columns that are new in the run. Of the other columns the file may know more by now, for other
    processes write to it too. So it is read again under a lock, and keeps what they wrote.
    """
    with disk.locked(path):
        ours, others = _read(path, experiment)
        same = [r for r in ours if (r["cell"], r["seed"]) == (run["cell"], run["seed"])]
        there = {**run["columns"], **(same[0]["columns"] if same else {}), **{c: run["columns"][c] for c in done}}
        run = {**run, "columns": {column: there[column] for column in experiment.methods if column in there}}
        order = {json.dumps(cell, sort_keys=True): i for i, cell in enumerate(experiment.cells)}
        ours = sorted(
            [*(r for r in ours if r not in same), run],
            key=lambda r: (order.get(json.dumps(r["cell"], sort_keys=True), len(order)), r["seed"]),
        )
        disk.write_json(path, _content(experiment, ours + others))
    return _content(experiment, ours)


def _content(experiment: Experiment, runs: list[Run]) -> dict[str, Any]:
    return {"experiment": experiment.name, "title": experiment.title, "quick": experiment.quick, "runs": runs}


def _read(path: Path, experiment: Experiment) -> tuple[list[Run], list[Run]]:
    """Runs of these very clients, and runs of others (trained otherwise), which stay in the file as they are."""
    ours: list[Run] = []
    others: list[Run] = []
    try:
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
        for run in old["runs"]:
            for column in dict(run["columns"]).values():
                float(column["accuracy"])
            (ours if run["made_of"] == made_of(experiment, run["cell"], run["seed"]) else others).append(run)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"{path} must hold results of {experiment.name}, got something else; move it away") from error
    return ours, others
