"""The file of an experiment's results: where it is, how it is read, and how a measured column gets into it.

It holds a run for every cell and seed, and in it a record for every column. A record is complete by itself: what was
measured, in how many seconds, with which settings, on what data, clients, code, device and versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from maecho import disk
from maecho.errors import InputError
from maecho.lab import experiment as configs
from maecho.lab.experiment import Cell, Experiment
from maecho.lab.harness.code import Code, changed

Record = dict[str, Any]
"""One column of one run."""
FORMAT = 2
"""The version of the file. It goes up when older files cannot be read any more."""
NEEDED = ("settings", "data", "clients", "code")
"""The entries without which a record cannot be compared with what would be measured now."""


class Named(Protocol):
    """Something that has results."""

    @property
    def name(self) -> str: ...
    @property
    def quick(self) -> bool: ...


def results_path(experiment: Named, out: Path | None = None) -> Path:
    """The file of the results, by default in `results_folder`."""
    return (out or results_folder()) / f"{experiment.name}{'-quick' if experiment.quick else ''}.json"


def results_folder() -> Path:
    """Where results are if nothing else is said: beside the configs of a checkout, or else in the current folder."""
    # An installed package is never written to: an upgrade would take the results along.
    return configs.CHECKOUT / "results" if configs.CHECKOUT.is_dir() else Path("maecho-results")


def read_results(path: Path, experiment: Experiment) -> dict[str, Any]:
    """Read all results. Without a file there are none. A damaged file raises InputError and stays as it is."""
    empty = {
        "experiment": experiment.name, "title": experiment.title, "quick": experiment.quick, "format": FORMAT,
        "runs": [], "code": {},
    }  # fmt: skip
    if not path.exists():
        return empty
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found.get("format", 1)
        if version == FORMAT:
            _check(found)
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise InputError(f"{path} must hold results of {experiment.name}, got something else; move it away") from error
    if version != FORMAT:
        raise InputError(f"{path} must hold results of format {FORMAT}, got format {version}; move it away")
    return {**empty, "runs": found["runs"], "code": found["code"]}


def _check(found: Mapping[str, Any]) -> None:
    """Raise an error unless everything is there that is read later."""
    for modules in found["code"].values():
        dict(modules)
    for run in found["runs"]:
        dict(run["cell"]), int(run["seed"]), str(run["clients"]), str(run["data"])
        for record in dict(run["columns"]).values():
            float(record["accuracy"])
            for key in NEEDED:
                if not isinstance(record[key], str):
                    raise TypeError(f"{key} must be a text")


def run_of(results: Mapping[str, Any], cell: Cell, seed: int) -> dict[str, Any] | None:
    """The run of this cell and seed, if there is one."""
    return next((r for r in results["runs"] if r["cell"] == cell and r["seed"] == seed), None)


def differences(record: Record, wanted: Record, code: Code, results: Mapping[str, Any]) -> list[str]:
    """Sentences that say why a record does not fit what would be measured now. `wanted` describes that measurement."""
    accepted = record.get("trusted", {})
    found = []
    if record["settings"] != wanted["settings"]:
        found.append("it has other settings")
    if wanted["data"] not in (record["data"], accepted.get("data")):
        found.append("the data are others")
    elif wanted["clients"] not in (record["clients"], accepted.get("clients")):
        found.append("the clients were split, started or trained otherwise")
    if code.digest not in (record["code"], accepted.get("code")):
        modules = changed(results["code"].get(record["code"], {}), code.modules)
        found.append(f"its code has changed ({', '.join(modules)})")
    return found


def put(
    path: Path,
    experiment: Experiment,
    run: Mapping[str, Any],
    columns: Mapping[str, Record],
    code: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Write columns of one run into the file; the results as of now.

    Other processes write to the file too, so it is read again under a lock, and everything else in it is kept.

    Args:
        run: what is said of the run beside its columns.
        columns: the new records.
        code: digest of the code that made them -> its modules.
    """
    with disk.locked(path):
        results = read_results(path, experiment)
        old = run_of(results, run["cell"], run["seed"])
        there = {**(old["columns"] if old else {}), **columns}
        listed = [*experiment.methods, *(column for column in there if column not in experiment.methods)]
        new = {**run, "columns": {column: there[column] for column in listed if column in there}}
        order = {json.dumps(cell, sort_keys=True): i for i, cell in enumerate(experiment.cells)}
        results["runs"] = sorted(
            [*(r for r in results["runs"] if r is not old), new],
            key=lambda r: (order.get(json.dumps(r["cell"], sort_keys=True), len(order)), r["seed"]),
        )
        used = {record["code"] for r in results["runs"] for record in r["columns"].values()}
        modules = {**results["code"], **code}
        results["code"] = {digest: dict(modules[digest]) for digest in sorted(used) if digest in modules}
        disk.write_json(path, results)
    return results
