"""The runs of an experiment: every cell of its table with every seed.

A run splits the data, trains the clients, gathers their statistics, applies every method and tests. Results are written
after every run; what is there already is not done again.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from maecho._version import __version__
from maecho.aggregation import aggregate
from maecho.echo.relay import relay
from maecho.errors import InputError
from maecho.evaluation import Ensemble, evaluate
from maecho.lab import data, networks, partition
from maecho.lab.clients import Client, batches_of, derived_seed, made_of, split, train
from maecho.lab.experiment import Cell, Experiment, drawn_by, gathered, plain, protocol, settings
from maecho.lab.results import add_run, read_results, results_path
from maecho.network import spaces
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload


def reproduce(
    experiment: Experiment,
    out: Path | None = None,
    jobs: int = 1,
    device: str = "cpu",
    on_run: Callable[[int, int, dict[str, Any]], None] | None = None,
    columns: Collection[str] | None = None,
) -> dict[str, Any]:
    """Do every run that is not done yet, and return the results as they are on disk.

    Args:
        experiment: what to run.
        out: the folder of the results; see `results_path`.
        jobs: how many runs go on at a time, each in a process of one thread.
        device: where clients are trained and merged.
        on_run: called after every run with the number of finished runs, the number of all, and the run.
        columns: which columns of the table to do. None: all of them; (): none, so that what is there comes back.
    """
    for column in columns or ():
        if column not in experiment.methods:
            raise InputError(f"columns must be among {', '.join(experiment.methods)}, got {column!r}")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise InputError(f"device must be cpu, or cuda where torch sees a GPU, got {device!r}")
    path = results_path(experiment, out)
    results = read_results(path, experiment)
    todo = []
    for cell in experiment.cells:
        for seed in experiment.seeds:
            old = next((r for r in results["runs"] if r["cell"] == cell and r["seed"] == seed), None)
            if _columns_to_do(experiment, old, columns):
                todo.append((cell, seed, old))
    done = len(experiment.cells) * len(experiment.seeds) - len(todo)
    for run in _all(experiment, todo, jobs, device, columns):
        old = next((o for cell, seed, o in todo if (cell, seed) == (run["cell"], run["seed"])), None)
        results = add_run(path, experiment, run, _columns_to_do(experiment, old, columns))
        done += 1
        if on_run is not None:
            on_run(done, len(experiment.cells) * len(experiment.seeds), run)
    return results


def _columns_to_do(
    experiment: Experiment, old: Mapping[str, Any] | None, columns: Collection[str] | None
) -> dict[str, Mapping[str, Any]]:
    """The wanted columns that an old run does not have with the settings of now."""
    done = old["columns"] if old else {}
    wanted = {c: o for c, o in experiment.methods.items() if columns is None or c in columns}
    return {c: o for c, o in wanted.items() if done.get(c, {}).get("settings") != settings(o)}


def _all(
    experiment: Experiment,
    todo: list[tuple[Cell, int, dict[str, Any] | None]],
    jobs: int,
    device: str,
    columns: Collection[str] | None,
) -> Iterator[dict[str, Any]]:
    """The runs in the order in which they finish."""
    if jobs <= 1:
        for cell, seed, old in todo:
            yield run_cell(experiment, cell, seed, old, device, columns)
        return
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures: list[Future[dict[str, Any]]] = [
            pool.submit(run_cell, experiment, cell, seed, old, device, columns) for cell, seed, old in todo
        ]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_cell(
    experiment: Experiment,
    cell: Cell,
    seed: int,
    old: dict[str, Any] | None = None,
    device: str = "cpu",
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Do one run. If there is an `old` one, only columns that are missing or have changed are done."""
    columns = _columns_to_do(experiment, old, only)
    machine = device if device == "cpu" else torch.cuda.get_device_name()
    dataset = data.load(experiment.data)
    parts = split(dataset, cell, seed)
    began = time.perf_counter()
    models = train(experiment, cell, seed, dataset, parts, device)
    trained = time.perf_counter()
    needs = {"classes"}
    for options in columns.values():
        if "upload" not in options:
            needs |= gathered(options)
    clients: list[Client] = [
        (model.to(device), batches_of(experiment, dataset, part, seed, i))
        for i, (model, part) in enumerate(zip(models, parts, strict=True))
    ]
    uploads = _uploads(clients, needs, device, {"rank": None})
    ready = time.perf_counter()
    test = data.batches(dataset.x_test, dataset.y_test, 1000)
    found = {}
    # What echo-chain has fitted, and in how many seconds: relays that draw the same inputs go on from it.
    chains: dict[str | None, tuple[Mapping[str, torch.Tensor], float]] = {}
    for column, options in columns.items():
        given = uploads
        if "upload" in options:
            given = _uploads(clients, gathered(options), device, options["upload"])
        start, before = None, 0.0
        if options["method"] == "echo-relay":
            start, before = chains.get(drawn_by(options), (None, 0.0))
        began_column = time.perf_counter()
        made, sent = _apply(experiment, options, clients, given, device, start)
        seconds = before + time.perf_counter() - began_column
        if options["method"] == "echo-chain" and isinstance(made, nn.Module):
            chains[drawn_by(options)] = made.state_dict(), seconds
        found[column] = {
            "settings": settings(options),
            "accuracy": _accuracy(made, test, device),
            "seconds": round(seconds, 4),
            "bytes": sent,
            "device": machine,
        }
    kept = {c: v for c, v in (old["columns"].items() if old else ()) if c in experiment.methods}
    return {
        "cell": dict(cell),
        "seed": seed,
        "made_of": made_of(experiment, cell, seed),
        "partition": partition.class_counts(dataset.y_train.numpy(), parts, dataset.classes).tolist(),
        "columns": {column: {**kept, **found}[column] for column in experiment.methods if column in {**kept, **found}},
        "weights_bytes": max(upload.bytes(()) for upload in uploads),
        "seconds": {"training": round(trained - began, 2), "statistics": round(ready - trained, 2)},
        "device": machine,
        "versions": {
            "maecho": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def _uploads(clients: list[Client], needs: Collection[str], device: str, options: Mapping[str, Any]) -> list[Upload]:
    uploads = [
        make_upload(
            model,
            batches,
            f"client-{i:02}",
            sorted(needs),
            progress=False,
            generator=torch.Generator().manual_seed(derived_seed("signs", i)),
            **options,
        )
        for i, (model, batches) in enumerate(clients)
    ]
    # If they do not all fit, `aggregate` moves each of them when it reads it.
    with contextlib.suppress(torch.OutOfMemoryError):
        return [upload.to(device) for upload in uploads]
    return uploads


def _apply(
    experiment: Experiment,
    options: Mapping[str, Any],
    clients: list[Client],
    uploads: list[Upload],
    device: str,
    start: Mapping[str, torch.Tensor] | None,
) -> tuple[nn.Module | list[nn.Module], int]:
    """The model (or models) that a column measures, and the bytes sent for it by the client that sends most.

    A relay goes on from `start`, the model of an echo-chain with the same drawn inputs, if there is one.
    """
    models = [model for model, _ in clients]
    if options["method"] == "local":
        return models, 0
    if options["method"] == "ensemble":
        counts = [
            upload.statistics.get("classes") for upload in uploads if upload.statistics.get("classes") is not None
        ]
        return Ensemble(models, options.get("by", "probabilities"), counts), max(u.bytes(()) for u in uploads)
    model = networks.build(experiment.network, torch.Generator().manual_seed(0))
    if options["method"] == "echo-relay":
        arguments = protocol(options)
        before = uploads if "drawing" in arguments else None  # without drawn inputs there is no upload
        merged = relay(model.to(device), clients, uploads=before, start=start, progress=False, **arguments)
        model.load_state_dict(merged)
        return model, merged.recipe["upload_bytes"] + sum(stage["bytes"] for stage in merged.recipe["rounds"])
    sent = max(upload.bytes(gathered(options)) for upload in uploads)
    return spaces.load(model, aggregate(uploads, model=model, **{"device": device, **plain(options)})), sent


def _accuracy(model: nn.Module | list[nn.Module], test: data.Batches, device: str) -> float:
    """In per cent; the mean, if there are several models."""
    models = model if isinstance(model, list) else [model]
    each = [evaluate(one.to(device), test, progress=False).accuracy for one in models]
    return round(100 * statistics.fmean(each), 2)
