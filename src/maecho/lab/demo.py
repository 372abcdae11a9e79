"""The whole job on the digits of scikit-learn: several clients, one upload from each, several merged models."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import nn

from maecho.aggregation import aggregate
from maecho.echo.relay import relay
from maecho.errors import InputError
from maecho.evaluation import Ensemble, evaluate
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining
from maecho.progress import track
from maecho.upload import storage
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload

NETWORK = "digits-mlp"
TRAINING = LocalTraining(epochs=60, learning_rate=0.05, momentum=0.5, batch_size=16)
"""Every client fits its own data in these epochs."""

MADE_BY_DEMO = "demo"
"""The entry of a recipe that says how the demo was run. A later demo replaces only files that have it."""
MERGED = ("fedavg", "ma-echo", "regmean", "echo-chain")


@dataclass(frozen=True)
class Row:
    """One line of the demo's table."""

    name: str
    accuracy: float
    seconds: float
    file: str | None
    """The file of the merged model, if there is one."""
    per_class: tuple[float, ...]
    """The accuracy on each digit."""
    calibration_error: float | None = None
    """How far the model's confidence is from its accuracy; see Evaluation."""


@dataclass(frozen=True)
class Demo:
    """The uploads that a demo made, and how good the models are."""

    uploads: tuple[str, ...]
    upload_bytes: tuple[int, ...]
    class_counts: tuple[tuple[int, ...], ...]
    rows: tuple[Row, ...]


def demo(out: Path, clients: int = 5, beta: float = 0.01, seed: int = 0, progress: bool | None = None) -> Demo:
    """Split the digits, train the clients, upload, merge and compare.

    Every file is written under `out`; those of an earlier demo there are replaced.
    """
    for i in range(clients):
        _check_free(out / f"client-{i}.safetensors", "upload")
    for method in (*MERGED, "echo-relay"):
        _check_free(out / f"merged-{method}.safetensors", "model")
    how = {"clients": clients, "beta": beta, "seed": seed}
    digits = data.digits()
    parts = partition.dirichlet(digits.y_train.numpy(), clients, beta, np.random.default_rng(seed))
    rng = torch.Generator().manual_seed(seed)
    start = networks.build(NETWORK, rng).state_dict()
    models, files, pairs = [], [], []
    for i, part in enumerate(track(parts, "training clients", show=progress)):
        index = torch.from_numpy(part)
        x, y = digits.x_train[index], digits.y_train[index]
        model = networks.build(NETWORK, rng)
        model.load_state_dict(start)
        TRAINING(model, x, y, rng)
        batches = data.batches(x, y, TRAINING.batch_size, rng)
        path = out / f"client-{i}.safetensors"
        made = make_upload(model, batches, client=f"client-{i}", progress=False)
        replace(made, recipe={**made.recipe, MADE_BY_DEMO: how}).save(path)
        models.append(model)
        files.append(path)
        pairs.append((model, batches))

    test = data.batches(digits.x_test, digits.y_test, 500)
    local = [evaluate(m, test) for m in models]
    of_classes = tuple(map(fmean, zip(*(found.per_class for found in local), strict=True)))
    accuracy, error = fmean(found.accuracy for found in local), fmean(found.calibration_error for found in local)
    rows = [Row("local (mean)", accuracy, 0.0, None, of_classes, error)]
    for method in (*MERGED, "echo-relay"):
        model = networks.build(NETWORK, rng)
        began = time.perf_counter()
        merged = (
            relay(model, pairs, progress=False) if method == "echo-relay" else aggregate(files, method, model=model)
        )
        seconds = time.perf_counter() - began
        path = out / f"merged-{method}.safetensors"
        merged.recipe[MADE_BY_DEMO] = how
        merged.save(path)
        model.load_state_dict(merged)
        measured = evaluate(model, test)
        error = measured.calibration_error
        rows.append(Row(method, measured.accuracy, seconds, str(path), measured.per_class, error))
    rows.append(_ensemble(models, test))
    counts = [Upload.load(path, only=("classes",)).statistics.get("classes") for path in files]
    return Demo(
        uploads=tuple(str(path) for path in files),
        upload_bytes=tuple(path.stat().st_size for path in files),
        class_counts=tuple(tuple(c.tolist()) for c in counts if c is not None),
        rows=tuple(rows),
    )


def _check_free(path: Path, kind: str) -> None:
    """Raise InputError unless the place is free, or holds what an earlier demo wrote under this file name."""
    if not os.path.lexists(path):
        return
    try:
        about = storage.read_about(path, kind)
    except InputError as error:
        raise InputError(f"{path} must be free or hold what an earlier demo wrote, got another file") from error
    recipe = about.get("recipe")
    if not isinstance(recipe, dict) or MADE_BY_DEMO not in recipe:
        whose = repr(about.get("client")) if kind == "upload" else "a model that was merged without it"
        raise InputError(f"{path} must be free or hold what an earlier demo wrote, got a file of {whose}")


def _ensemble(models: list[nn.Module], test: data.Batches) -> Row:
    began = time.perf_counter()
    found = evaluate(Ensemble(models, "probabilities"), test)
    seconds, error = time.perf_counter() - began, found.calibration_error
    return Row(f"ensemble of {len(models)}", found.accuracy, seconds, None, found.per_class, error)
