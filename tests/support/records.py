"""Results of experiments as if they had been measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from maecho.lab.columns import settings
from maecho.lab.experiment import Cell, Experiment

CLIENTS, DATA = "the clients", "the data"


def record(options: Mapping[str, Any], accuracy: float = 50.0, **more: Any) -> dict[str, Any]:
    """One column of one run, measured as the options say."""
    seconds = {"training": 3.0, "gathering": 2.0, "merging": 1.0}
    return {
        "settings": settings(options), "accuracy": accuracy, "seconds": seconds, "bytes": 1000, "data": DATA,
        "clients": CLIENTS, "code": "the code", **more,
    }  # fmt: skip


def run(cell: Cell, seed: int, columns: Mapping[str, Any], weights_bytes: int = 1000) -> dict[str, Any]:
    return {
        "cell": cell, "seed": seed, "data": DATA, "clients": CLIENTS, "columns": dict(columns),
        "weights_bytes": weights_bytes,
    }  # fmt: skip


def results(
    config: Experiment, accuracy: Callable[[int], float] = float, size: Callable[[int], int | None] = lambda k: 1000
) -> dict[str, Any]:
    """All columns of all runs; accuracy and size follow from a column's place."""
    columns = {
        name: record(options, accuracy(k), bytes=0 if name == "local" else size(k))
        for k, (name, options) in enumerate(config.methods.items())
    }
    runs = [run(cell, seed, columns) for cell in config.cells for seed in config.seeds]
    return {"format": 2, "runs": runs, "code": {"the code": {}}}
