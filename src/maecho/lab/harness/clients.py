"""The clients of one run: the data split, and a model trained on each part.

Trained models are kept in a cache, each under a hash of all that made it: its examples, its random streams, the
network, the training and the code of both. So a new method costs no training, and a change of any of these trains anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from maecho import disk
from maecho.errors import InputError
from maecho.lab import data, networks, partition, splits
from maecho.lab.experiment import Cell, Experiment
from maecho.lab.harness.cache import cache_folder, digest, weights_digest
from maecho.lab.harness.code import Code
from maecho.lab.harness.machine import machine, versions
from maecho.lab.harness.streams import Streams
from maecho.lab.training import LocalTraining
from maecho.statistics.projector import RELEASED_MEAN_OF
from maecho.upload import storage

AT_ONCE = 16
"""Statistics are gathered from batches of so many training batches, which is faster. They do not depend on it."""

Client = tuple[nn.Module, data.Batches]
"""A trained model and its data."""


@dataclass(frozen=True)
class Trained:
    """One client's model, and the record of its training, which may be old and from another machine."""

    model: nn.Module
    seconds: float
    device: str
    weights: str
    """Digest of the weights."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """The clients of one cell with one seed, before they are trained."""

    experiment: Experiment
    cell: Cell
    seed: int
    dataset: data.Dataset
    parts: Sequence[np.ndarray]
    """The examples of each client, as indices into the training set."""

    @classmethod
    def of(cls, experiment: Experiment, cell: Cell, seed: int, dataset: data.Dataset) -> Cohort:
        rng = Streams.of(experiment, cell, seed).partition()
        parts = splits.SPLITS[experiment.split].divide(dataset, cell, rng)
        return cls(experiment, cell, seed, dataset, parts)

    @property
    def training(self) -> LocalTraining:
        return self.experiment.training_of(self.cell)

    @property
    def streams(self) -> Streams:
        return Streams.of(self.experiment, self.cell, self.seed)

    @property
    def code(self) -> Code:
        """The network and its training."""
        return Code.of(networks.NETWORKS[self.experiment.network], networks.build, LocalTraining, _fit)

    @property
    def class_counts(self) -> list[list[int]]:
        """How many examples of each class every client holds."""
        labels = self.dataset.y_train.numpy()
        return partition.class_counts(labels, list(self.parts), self.dataset.classes).tolist()  # type: ignore[no-any-return]

    @property
    def made_of(self) -> str:
        """A hash of everything that the clients' data and models depend on. The methods are no part of it."""
        return digest(*(self._identity(client) for client in range(len(self.parts))))

    def pooled(self) -> Cohort:
        """The cohort of a single client, which holds the data of all clients."""
        everything = np.sort(np.concatenate(self.parts))
        return replace(self, parts=[everything], cell={**self.cell, "pooled": True})

    def train(self, device: str, on_client: Callable[[int, int], None] | None = None) -> list[Trained]:
        """Every client's model. It is read from the cache if it is there."""
        found = []
        for client in range(len(self.parts)):
            if on_client is not None:
                on_client(client, len(self.parts))
            found.append(self._trained(client, device))
        return found

    def batches(self, client: int) -> data.Batches:
        """A client's data, in the order in which its statistics are gathered."""
        x, y = self._examples(client)
        return data.batches(x, y, AT_ONCE * self.training.batch_size, self.streams.batches(client))

    @property
    def mean_of(self) -> int:
        """How many examples a mean of the released projector is over: a batch of training, as in the release, but no
        more than there."""
        return min(RELEASED_MEAN_OF, self.training.batch_size)

    def _examples(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(np.asarray(self.parts[client]))
        return self.dataset.x_train[index], self.dataset.y_train[index]

    def _trained(self, client: int, device: str) -> Trained:
        path = cache_folder() / "clients" / f"{self._identity(client)}.safetensors"
        with disk.locked(path):  # of two runs at once only one trains the client
            if path.exists():
                with contextlib.suppress(InputError, KeyError, RuntimeError):  # a damaged file is replaced
                    about = storage.read_about(path, "model")["trained"]
                    model = networks.build(self.experiment.network, torch.Generator())
                    model.load_state_dict(storage.read_tensors(path))
                    return Trained(model.eval(), float(about["seconds"]), str(about["device"]), weights_digest(model))
            model = networks.build(self.experiment.network, self.streams.initial(client))
            began = time.perf_counter()
            _fit(self.training, model.to(device), *self._examples(client), self.streams.training(client))
            seconds = round(time.perf_counter() - began, 4)
            trained = {"seconds": seconds, "device": machine(device), "versions": versions(), **self._described(client)}
            storage.write_tensors(path, "model", model.cpu().state_dict(), {"recipe": {}, "trained": trained})
        return Trained(model, seconds, machine(device), weights_digest(model))

    def _described(self, client: int) -> dict[str, Any]:
        return {"experiment": self.experiment.name, "cell": dict(self.cell), "seed": self.seed, "client": client}

    def _identity(self, client: int) -> str:
        return digest(
            self.dataset.digest,
            hashlib.sha256(np.ascontiguousarray(self.parts[client], "<i8").tobytes()).hexdigest(),
            self.experiment.network,
            repr(self.training),
            self.streams.initial(client).initial_seed(),
            self.streams.training(client).initial_seed(),
            self.code.digest,
        )


def _fit(
    training: LocalTraining, model: nn.Module, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator
) -> None:
    training(model, x, y, generator)
