"""Trained clients, and their uploads, for the studies that look at them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from maecho.lab import networks
from maecho.lab.experiment import Experiment
from maecho.lab.harness.clients import Cohort
from maecho.lab.studies.found import Task
from maecho.lab.training import LocalTraining
from maecho.network import spaces
from maecho.statistics import STATISTICS
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload


@dataclass(frozen=True, kw_only=True)
class Clients:
    """The settings of such a study. The clients are those of the tables with the same settings, from the same cache."""

    data: str = "mnist"
    network: str = "mlp"
    clients: int = 3
    beta: float = 0.01
    init: Literal["same", "different"] = "different"
    training: LocalTraining = field(default_factory=LocalTraining)

    def __post_init__(self) -> None:
        if self.network not in networks.NETWORKS:
            raise ValueError(f"network must be among {', '.join(networks.NETWORKS)}, got {self.network!r}")
        if self.clients < 2:
            raise ValueError(f"clients must be at least 2, got {self.clients}")
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta must be positive and finite, got {self.beta}")

    @property
    def rows(self) -> tuple[Any, ...]:
        return (networks.NETWORKS[self.network], *(type(STATISTICS[name]) for name in self.statistics))

    @property
    def statistics(self) -> tuple[str, ...]:
        """What the uploads carry."""
        return ("gram", "projector", "classes")

    def cohort(self, task: Task) -> Cohort:
        """The clients before they are trained."""
        cell = {"clients": self.clients, "beta": self.beta, "init": self.init}
        experiment = Experiment("study", "", self.data, self.network, (task.seed,), (cell,), {}, self.training)
        return Cohort.of(experiment, cell, task.seed, task.data)

    def trained(self, cohort: Cohort, task: Task, share: float) -> list[nn.Module]:
        """The clients' models. `share`: how much of the study this is."""
        found = cohort.train(task.device, lambda i, n: task.tell(share * i / n, f"trains client {i + 1} of {n}"))
        return [one.model.to(task.device) for one in found]

    def uploads(self, cohort: Cohort, models: Iterable[nn.Module]) -> list[Upload]:
        return [
            make_upload(
                model, cohort.batches(i), f"client-{i:03}", self.statistics, rank=None, progress=False,
                generator=cohort.streams.labels(i), mean_of=cohort.mean_of,
            )
            for i, model in enumerate(models)
        ]  # fmt: skip

    def model(self, weights: Any) -> nn.Module:
        """The network with these weights."""
        return spaces.load(networks.build(self.network, torch.Generator().manual_seed(0)), weights).eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In per cent."""
    device = next(model.parameters()).device
    return 100 * float((model(x.to(device)).argmax(1) == y.to(device)).double().mean())


def own_examples(cohort: Cohort, client: int, most: int) -> tuple[Tensor, Tensor]:
    """The first examples of a client's training data."""
    index = torch.from_numpy(cohort.parts[client][:most])
    return cohort.dataset.x_train[index], cohort.dataset.y_train[index]
