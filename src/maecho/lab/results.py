"""The file of an experiment's results: where it is, how it is read, and how a finished run gets into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maecho.errors import UploadError
from maecho.lab import experiment as configs
from maecho.lab.clients import made_of
from maecho.lab.experiment import Experiment
from maecho.upload import storage as files

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


def add_run(path: Path, experiment: Experiment, run: Run) -> dict[str, Any]:
    """Put a finished run into the file, in place of an older one of the same cell and seed; the results as of now."""
    ours, others = _read(path, experiment)
    same = [r for r in ours if not (r["cell"] == run["cell"] and r["seed"] == run["seed"])]
    order = {json.dumps(cell, sort_keys=True): i for i, cell in enumerate(experiment.cells)}
    ours = sorted([*same, run], key=lambda r: (order.get(json.dumps(r["cell"], sort_keys=True), len(order)), r["seed"]))
    files.write_json(path, _content(experiment, ours + others))
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
        raise UploadError(f"{path} must hold results of {experiment.name}, got something else; move it away") from error
    return ours, others
