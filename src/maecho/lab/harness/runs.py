"""The runs of an experiment: every cell of its table with every seed, column by column.

A column is written as soon as it is measured. What is there already and still fits is not measured again. What does not
fit is named and measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any, Literal

import torch

from maecho._version import __version__
from maecho.errors import InputError
from maecho.lab import data
from maecho.lab.columns import settings
from maecho.lab.experiment import Cell, Experiment
from maecho.lab.harness import inputs, machine
from maecho.lab.harness.clients import Cohort
from maecho.lab.harness.columns import Bench, code_of, measure
from maecho.lab.harness.results import Record, differences, put, read_results, results_path, run_of

PAUSE = 0.1
"""Seconds between two looks at whether a process has failed."""


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    what: Literal["training", "started", "measured", "fits", "trusted", "again"]
    cell: Cell
    seed: int
    column: str = ""
    text: str = ""
    """Words for people: which client is trained, or why a column is measured again or trusted."""

    @property
    def finished(self) -> bool:
        """Whether a column is done."""
        return self.what in ("measured", "fits", "trusted")


Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Job:
    """What to do for every cell and seed."""

    experiment: Experiment
    path: Path
    columns: tuple[str, ...]
    device: str
    trust: bool


def reproduce(
    experiment: Experiment,
    out: Path | None = None,
    jobs: int = 1,
    device: str = "cpu",
    on_event: Listener | None = None,
    columns: Collection[str] | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Measure every column that is missing or does not fit any more, and return the results as they are on disk.

    Args:
        experiment: what to run.
        out: the folder of the results; see `results_path`.
        jobs: how many runs go on at a time, each in a process of one thread.
        device: where clients are trained and merged.
        on_event: called for everything that happens.
        columns: which columns of the table to do. None: all of them; (): none, so that what is there comes back.
        trust: keep records that were made with other data, clients or code, if their settings are those of now. The
            record says so from then on.
    """
    for column in columns or ():
        if column not in experiment.methods:
            raise InputError(f"columns must be among {', '.join(experiment.methods)}, got {column!r}")
    machine.check(device)
    path = results_path(experiment, out)
    results = read_results(path, experiment)
    chosen = tuple(column for column in experiment.methods if columns is None or column in columns)
    if not chosen:
        return results
    job = Job(experiment, path, chosen, device, trust)
    tell = on_event or (lambda event: None)
    tasks = [(cell, seed) for cell in experiment.cells for seed in experiment.seeds]
    if jobs <= 1:
        dataset = inputs.load(experiment, device)
        for cell, seed in tasks:
            run_cell(job, cell, seed, dataset, tell)
    else:
        for event in _in_processes(job, tasks, jobs):
            tell(event)
    return read_results(path, experiment)


def run_cell(job: Job, cell: Cell, seed: int, dataset: data.Dataset, tell: Listener) -> None:
    """Do one run. Each column is written before its event is sent."""
    experiment = job.experiment
    cohort = Cohort.of(experiment, cell, seed, dataset)
    bench = Bench(cohort, job.device, lambda i, n: tell(Event("training", cell, seed, text=f"client {i + 1} of {n}")))
    about = {
        "cell": dict(cell), "seed": seed, "data": dataset.digest, "clients": cohort.made_of,
        "partition": cohort.class_counts,
    }  # fmt: skip
    results = read_results(job.path, experiment)
    old = run_of(results, cell, seed) or {"columns": {}}
    for column in job.columns:
        options = experiment.methods[column]
        code = code_of(options)
        wanted = {
            "settings": settings(options), "data": dataset.digest, "clients": cohort.made_of, "code": code.digest,
        }  # fmt: skip
        record: Record | None = old["columns"].get(column)
        reasons = [] if record is None else differences(record, wanted, code, results)
        if record is not None and not reasons:
            tell(Event("fits", cell, seed, column))
        elif record is not None and job.trust and record["settings"] == wanted["settings"]:
            trusted = {**wanted, "because": reasons, "maecho": __version__}
            put(job.path, experiment, {**old, **about}, {column: {**record, "trusted": trusted}}, {})
            tell(Event("trusted", cell, seed, column, "; ".join(reasons)))
        else:
            tell(Event("again" if reasons else "started", cell, seed, column, "; ".join(reasons)))
            measured = measure(bench, options)
            about["weights_bytes"] = bench.weights_bytes
            put(job.path, experiment, about, {column: measured}, {code.digest: code.modules})
            tell(Event("measured", cell, seed, column))


_worker: dict[str, Any] = {}
"""What one process of the pool keeps between runs: the queue for its events, and the data set after it was loaded."""


def _start_worker(events: Any) -> None:
    torch.set_num_threads(1)
    _worker["events"] = events


def _work(job: Job, cell: Cell, seed: int) -> None:
    if "dataset" not in _worker:
        _worker["dataset"] = inputs.load(job.experiment, job.device)
    run_cell(job, cell, seed, _worker["dataset"], _worker["events"].put)


def _in_processes(job: Job, tasks: list[tuple[Cell, int]], jobs: int) -> Iterator[Event]:
    """Do the runs in processes of one thread each. Events come in the order in which they happen."""
    context = get_context("spawn")
    events = context.Queue()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(events,)) as pool:
        futures = [pool.submit(_work, job, cell, seed) for cell, seed in tasks]
        try:
            open_columns = len(tasks) * len(job.columns)
            while open_columns:
                try:
                    event: Event = events.get(timeout=PAUSE)
                except Empty:
                    for future in futures:
                        if future.done():
                            future.result()  # raises what ended it
                    continue
                open_columns -= event.finished
                yield event
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
