"""The experiment harness: one config of `experiments/` to one table beside the paper's.

A run is one cell of a table with one seed: split the data, train the clients, gather their statistics, apply every
method, test. Trained clients are cached by the hash of all that made them, so a new method costs no training. Results
are written after every run; what is there already is not done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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

from maecho import disk
from maecho._version import __version__
from maecho.aggregation import aggregate
from maecho.echo.relay import relay
from maecho.errors import InputError
from maecho.evaluation import Ensemble, evaluate
from maecho.lab import data, networks, partition
from maecho.lab.experiment import Cell, Experiment, drawn_by, gathered, plain, protocol, results_path, settings
from maecho.linalg.recursion import MEAN_OF
from maecho.network import spaces
from maecho.upload import storage as files
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload

Client = tuple[nn.Module, data.Batches]
"""A trained model and its data."""

RECIPE = 1
"""Raised when the way clients are split, initialised or trained changes, so that cached ones are not taken for new."""


def reproduce(
    experiment: Experiment,
    out: Path | None = None,
    jobs: int = 1,
    device: str = "cpu",
    on_run: Callable[[int, int, dict[str, Any]], None] | None = None,
    columns: Collection[str] | None = None,
) -> dict[str, Any]:
    """Do every run that is not done yet; the results, as they are on disk.

    `on_run` is told the number of finished runs, the number of all, and the run just finished. `columns` says
    which of the table's columns are done, None being all; `columns=()` does nothing, and gives what is there.
    """
    for column in columns or ():
        if column not in experiment.methods:
            raise InputError(f"columns must be among {', '.join(experiment.methods)}, got {column!r}")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise InputError(f"device must be cpu, or cuda where torch sees a GPU, got {device!r}")
    path = results_path(experiment, out)
    results, _ = _read_results(path, experiment)
    todo = []
    for cell in experiment.cells:
        for seed in experiment.seeds:
            old = next((r for r in results["runs"] if r["cell"] == cell and r["seed"] == seed), None)
            if _columns_to_do(experiment, old, columns):
                todo.append((cell, seed, old))
    done = len(experiment.cells) * len(experiment.seeds) - len(todo)
    for run in _all(experiment, todo, jobs, device, columns):
        old = next((o for cell, seed, o in todo if (cell, seed) == (run["cell"], run["seed"])), None)
        results = _add_run(path, experiment, run, _columns_to_do(experiment, old, columns))
        done += 1
        if on_run is not None:
            on_run(done, len(experiment.cells) * len(experiment.seeds), run)
    return results


def _add_run(path: Path, experiment: Experiment, run: dict[str, Any], done: Collection[str]) -> dict[str, Any]:
    """Write a run into the results file and give what is there then. `done` are the columns that are new in it: of the
    others the file may know more by now, since other processes write to it too."""
    with disk.locked(path):
        results, others = _read_results(path, experiment)
        same = [r for r in results["runs"] if (r["cell"], r["seed"]) == (run["cell"], run["seed"])]
        there = {**run["columns"], **(same[0]["columns"] if same else {}), **{c: run["columns"][c] for c in done}}
        run = {**run, "columns": {column: there[column] for column in experiment.methods if column in there}}
        order = {json.dumps(cell, sort_keys=True): i for i, cell in enumerate(experiment.cells)}
        results["runs"] = sorted(
            [*(r for r in results["runs"] if r not in same), run],
            key=lambda r: (order.get(json.dumps(r["cell"], sort_keys=True), len(order)), r["seed"]),
        )
        disk.write_json(path, {**results, "runs": results["runs"] + others})
    return results


def _read_results(path: Path, experiment: Experiment) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results of these very clients, and runs of others (trained otherwise) that stay in the file untouched."""
    results: dict[str, Any] = {
        "experiment": experiment.name,
        "title": experiment.title,
        "quick": experiment.quick,
        "runs": [],
    }
    others: list[dict[str, Any]] = []
    try:
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
        for run in old["runs"]:
            for column in dict(run["columns"]).values():
                float(column["accuracy"])
            ours = run["made_of"] == _made_of(experiment, run["cell"], run["seed"])
            (results["runs"] if ours else others).append(run)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"{path} must hold results of {experiment.name}, got something else; move it away") from error
    return results, others


def _columns_to_do(
    experiment: Experiment, old: Mapping[str, Any] | None, columns: Collection[str] | None
) -> dict[str, Mapping[str, Any]]:
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
    """Runs as they finish, in so many processes of one thread each."""
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
    """One run; of an old one only the columns that are missing or have changed."""
    columns = _columns_to_do(experiment, old, only)
    on = device if device == "cpu" else torch.cuda.get_device_name()
    dataset = data.load(experiment.data)
    parts = partition.dirichlet(
        dataset.y_train.numpy(), cell["clients"], cell["beta"], np.random.default_rng([seed, cell["clients"]])
    )
    began = time.perf_counter()
    models = _train(experiment, cell, seed, dataset, parts, device)
    trained = time.perf_counter()
    needs = {"classes"}
    for options in columns.values():
        if "upload" not in options:
            needs |= gathered(options)
    clients: list[Client] = []
    for i, (model, part) in enumerate(zip(models, parts, strict=True)):
        x, y = _take(dataset, part)
        order = torch.Generator().manual_seed(_seed("batches", seed, i))
        clients.append((model.to(device), data.batches(x, y, _batch_size(experiment), order)))
    uploads = _uploads(clients, needs, device, {"rank": None})
    ready = time.perf_counter()
    test = data.batches(dataset.x_test, dataset.y_test, 1000)
    found = {}
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
            chains[drawn_by(options)] = made.state_dict(), seconds  # for columns that go on from it
        found[column] = {
            "settings": settings(options),
            "accuracy": _accuracy(made, test, device),
            "seconds": round(seconds, 4),
            "bytes": sent,
            "device": on,
        }
    kept = {c: v for c, v in (old["columns"].items() if old else ()) if c in experiment.methods}
    return {
        "cell": dict(cell),
        "seed": seed,
        "made_of": _made_of(experiment, cell, seed),
        "partition": partition.class_counts(dataset.y_train.numpy(), parts, dataset.classes).tolist(),
        "columns": {column: {**kept, **found}[column] for column in experiment.methods if column in {**kept, **found}},
        "weights_bytes": max(upload.bytes(()) for upload in uploads),
        "seconds": {"training": round(trained - began, 2), "statistics": round(ready - trained, 2)},
        "device": on,
        "versions": {
            "maecho": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def _batch_size(experiment: Experiment) -> int:
    """Of the batches that statistics are gathered of: that of training, or 16 of these at once, for speed, where they
    are cut into the same pieces for the projectors all the same."""
    size = experiment.training.batch_size
    return size if size % MEAN_OF else 16 * size


def _uploads(clients: list[Client], needs: Collection[str], device: str, options: Mapping[str, Any]) -> list[Upload]:
    uploads = [
        make_upload(
            model,
            batches,
            f"client-{i:02}",
            sorted(needs),
            progress=False,
            generator=torch.Generator().manual_seed(_seed("signs", i)),
            **options,
        )
        for i, (model, batches) in enumerate(clients)
    ]
    with contextlib.suppress(torch.OutOfMemoryError):  # then `aggregate` moves them as it reads them
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
    """What a column is measured on, and how many bytes the client sends for it that sends most. A relay goes on from
    `start`, echo-chain's model, where there is one."""
    models = [model for model, _ in clients]
    if options["method"] == "local":
        return models, 0
    if options["method"] == "ensemble":
        counts = [upload.class_counts for upload in uploads if upload.class_counts is not None]
        return Ensemble(models, options.get("by", "probabilities"), counts), max(u.bytes(()) for u in uploads)
    model = networks.build(experiment.network, torch.Generator().manual_seed(0))
    if options["method"] == "echo-relay":
        merged = relay(model.to(device), clients, uploads=uploads, start=start, progress=False, **protocol(options))
        model.load_state_dict(merged)
        return model, merged.recipe["upload_bytes"] + sum(merged.recipe["bytes"])
    sent = max(upload.bytes(gathered(options)) for upload in uploads)
    return spaces.load(model, aggregate(uploads, model=model, **{"device": device, **plain(options)})), sent


def _accuracy(model: nn.Module | list[nn.Module], test: data.Batches, device: str) -> float:
    """In per cent; of several models the mean."""
    models = model if isinstance(model, list) else [model]
    each = [evaluate(one.to(device), test, progress=False).accuracy for one in models]
    return round(100 * statistics.fmean(each), 2)


def _train(
    experiment: Experiment, cell: Cell, seed: int, dataset: data.Dataset, parts: list[np.ndarray], device: str
) -> list[nn.Module]:
    """Every client's model, from the cache where it is there."""
    models = []
    for i, part in enumerate(parts):
        start = "all" if cell.get("init", "same") == "same" else i
        model = networks.build(experiment.network, torch.Generator().manual_seed(_seed("init", seed, start)))
        path = cache_folder() / "clients" / f"{_digest(_made_of(experiment, cell, seed), i)}.safetensors"
        about = {"recipe": {"experiment": experiment.name, "cell": dict(cell), "seed": seed, "client": i}}
        if path.exists():
            with contextlib.suppress(InputError):  # a damaged cache file is made again
                files.read_about(path, "model")
                model.load_state_dict(files.read_tensors(path))
                models.append(model.eval())
                continue
        x, y = _take(dataset, part)
        model.to(device)
        experiment.training(model, x, y, torch.Generator().manual_seed(_seed("training", seed, i)))
        models.append(model.cpu())
        files.write_tensors(path, "model", model.state_dict(), about)
    return models


def cache_folder() -> Path:
    return Path(os.environ.get("MAECHO_CACHE") or Path.home() / ".cache" / "maecho")


def _made_of(experiment: Experiment, cell: Cell, seed: int) -> str:
    """Hash of all that decides what the clients are; methods do not."""
    return _digest(
        RECIPE, experiment.data, experiment.network, repr(experiment.training), json.dumps(cell, sort_keys=True), seed
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:20]


def _seed(*parts: object) -> int:
    """Streams of random numbers that have nothing to do with each other."""
    return int(_digest(*parts)[:12], 16)


def _take(dataset: data.Dataset, part: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.from_numpy(np.asarray(part))
    return dataset.x_train[index], dataset.y_train[index]
