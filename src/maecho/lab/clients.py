"""The clients of one run: the data split, a model trained on each part, and the trained models kept in a cache.

A cached model is found by the hash of everything that made it, so a new method costs no training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from maecho.errors import InputError
from maecho.lab import data, networks, partition
from maecho.lab.experiment import Cell, Experiment
from maecho.randomness import seed_of
from maecho.statistics.projector import MEAN_OF
from maecho.upload import storage as files

Client = tuple[nn.Module, data.Batches]
"""A trained model and its data."""

RECIPE = 1
"""Raise this when the way clients are split, initialised or trained changes: cached clients are then made again."""


def split(dataset: data.Dataset, cell: Cell, seed: int) -> list[np.ndarray]:
    """The examples of each client, as indices into the training set."""
    rng = np.random.default_rng([seed, cell["clients"]])
    return partition.dirichlet(dataset.y_train.numpy(), cell["clients"], cell["beta"], rng)


def train(
    experiment: Experiment, cell: Cell, seed: int, dataset: data.Dataset, parts: list[np.ndarray], device: str
) -> list[nn.Module]:
    """Every client's model, read from the cache where it is there."""
    models = []
    for i, part in enumerate(parts):
        start = "all" if cell.get("init", "same") == "same" else i
        model = networks.build(experiment.network, torch.Generator().manual_seed(derived_seed("init", seed, start)))
        path = cache_folder() / "clients" / f"{_digest(made_of(experiment, cell, seed), i)}.safetensors"
        about = {"recipe": {"experiment": experiment.name, "cell": dict(cell), "seed": seed, "client": i}}
        if path.exists():
            with contextlib.suppress(InputError):  # a damaged cache file is made again
                files.read_about(path, "model")
                model.load_state_dict(files.read_tensors(path))
                models.append(model.eval())
                continue
        x, y = _take(dataset, part)
        model.to(device)
        experiment.training(model, x, y, torch.Generator().manual_seed(derived_seed("training", seed, i)))
        models.append(model.cpu())
        files.write_tensors(path, "model", model.state_dict(), about)
    return models


def batches_of(experiment: Experiment, dataset: data.Dataset, part: np.ndarray, seed: int, client: int) -> data.Batches:
    """A client's data in the order in which its statistics are gathered."""
    x, y = _take(dataset, part)
    return data.batches(
        x, y, batch_size(experiment), torch.Generator().manual_seed(derived_seed("batches", seed, client))
    )


def batch_size(experiment: Experiment) -> int:
    """The size of the batches that statistics are gathered from.

    16 training batches at a time are faster. The projectors cut batches into pieces of `MEAN_OF`, so they are the same
    only if a training batch consists of whole pieces; otherwise the batches of training are used as they are.
    """
    size = experiment.training.batch_size
    return size if size % MEAN_OF else 16 * size


def cache_folder() -> Path:
    return Path(os.environ.get("MAECHO_CACHE") or Path.home() / ".cache" / "maecho")


def made_of(experiment: Experiment, cell: Cell, seed: int) -> str:
    """Hash of everything that decides what the clients are. Methods do not."""
    return _digest(
        RECIPE, experiment.data, experiment.network, repr(experiment.training), json.dumps(cell, sort_keys=True), seed
    )


def derived_seed(*parts: object) -> int:
    """A seed for one purpose; streams for different purposes have nothing to do with each other."""
    return seed_of(_text(*parts))


def _digest(*parts: object) -> str:
    return hashlib.sha256(_text(*parts).encode()).hexdigest()[:20]


def _text(*parts: object) -> str:
    return json.dumps([str(part) for part in parts])


def _take(dataset: data.Dataset, part: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.from_numpy(np.asarray(part))
    return dataset.x_train[index], dataset.y_train[index]
