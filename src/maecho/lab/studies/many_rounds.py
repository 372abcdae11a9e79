"""Figure 9: many rounds. Servers and ways of local training side by side, on the same clients, samples and first
weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from maecho.errors import InputError
from maecho.lab import networks, partition
from maecho.lab.charts import Lines
from maecho.lab.data import Dataset
from maecho.lab.harness.cache import cache_folder, digest
from maecho.lab.harness.code import Code
from maecho.lab.harness.streams import stream
from maecho.lab.studies.found import Found, Task
from maecho.lab.training import LocalTraining
from maecho.rounds import LOSSES, DivergedError, History, Local, RoundRecord, Rounds, Sphere
from maecho.rounds.choices import find_server
from maecho.rounds.engine import Client

LEVELS = (80, 90, 95)
"""The accuracies in per cent to which rounds and bytes are counted."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One line of the figure."""

    server: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the server."""
    loss: str = "cross-entropy"
    clip: float | None = None
    fixed_head: bool = False
    """Whether the last layer is fixed and solved for, as by SphereFed."""


@dataclass(frozen=True, kw_only=True)
class ManyRounds:
    """The settings."""

    data: str = "mnist"
    network: str = "mlp"
    clients: int = 100
    sampled: int = 10
    split: Literal["classes", "dirichlet", "origins"] = "classes"
    """Whether clients have a few classes each, shares of all classes, or whole origins, such as writers."""
    classes: int = 2
    """How many classes every client has, if they are split by classes."""
    beta: float = 0.5
    """How equal the shares are, if they are drawn from a Dirichlet distribution."""
    rounds: int = 50
    means: tuple[tuple[int, int], ...] = ((1, 5), (31, 50))
    """Over which rounds, both counted from 1, mean accuracies are told."""
    training: LocalTraining = field(default_factory=LocalTraining)
    methods: Mapping[str, Method] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.network not in networks.NETWORKS:
            raise ValueError(f"network must be among {', '.join(networks.NETWORKS)}, got {self.network!r}")
        if not self.methods:
            raise ValueError("methods must be at least one, got none")
        if any(not 1 <= first <= last <= self.rounds for first, last in self.means):
            raise ValueError(f"means must be over rounds from 1 to {self.rounds}, got {[list(m) for m in self.means]}")
        if not 1 <= self.sampled <= self.clients:
            raise ValueError(f"sampled must be from 1 to the number of clients, {self.clients}, got {self.sampled}")
        if self.training.weight_decay or self.training.steps is not None:
            raise ValueError("training: weight_decay and steps are not for many rounds, got one of them")
        for name in self.methods:
            self.run(name, 0)

    @property
    def rows(self) -> tuple[Any, ...]:
        return (networks.NETWORKS[self.network],)

    def run(self, name: str, seed: int) -> Rounds:
        """The run of one method."""
        method = self.methods[name]
        if method.loss not in LOSSES:
            raise ValueError(f"methods: {name}: loss must be among {', '.join(LOSSES)}, got {method.loss!r}")
        try:
            server = find_server(method.server, method.options)
            given = self.training
            sphere = Sphere() if method.fixed_head else None
            local = Local(
                given.epochs, given.learning_rate, given.momentum, given.batch_size, method.clip, LOSSES[method.loss],
                sphere,
            )  # fmt: skip
        except InputError as error:
            raise ValueError(f"methods: {name}: {error}") from error
        return Rounds(self.rounds, self.sampled, server, local, seed)

    def parts(self, dataset: Dataset, seed: int) -> list[np.ndarray]:
        """The examples of each client."""
        hows = {"classes": self.classes, "dirichlet": self.beta, "origins": "origins"}
        what = {"data": self.data, "clients": self.clients, "classes": hows[self.split], "seed": seed}
        rng = np.random.default_rng(stream("rounds: partition", **what))
        labels = dataset.y_train.numpy()
        if self.split == "classes":
            return partition.by_classes(labels, self.clients, self.classes, rng)
        if self.split == "dirichlet":
            return partition.dirichlet(labels, self.clients, self.beta, rng)
        if dataset.groups_train is None:
            raise InputError(f"split: {dataset.name} must say where its examples come from, got none")
        return partition.by_groups(dataset.groups_train.numpy(), self.clients, rng)

    def __call__(self, task: Task) -> Found:
        dataset = task.data
        parts = [torch.from_numpy(part) for part in self.parts(dataset, task.seed)]
        clients: list[Client] = [
            (dataset.x_train[part].to(task.device), dataset.y_train[part].to(task.device)) for part in parts
        ]
        test = dataset.x_test.to(task.device), dataset.y_test.to(task.device)
        draw = stream("rounds: weights", network=self.network, seed=task.seed).generate_state(1)[0]
        model = networks.build(self.network, torch.Generator().manual_seed(int(draw))).to(task.device)
        complete = self._first_with_all_classes(parts, dataset, task.seed)
        numbers: dict[str, float] = {}
        if complete is not None:
            numbers["first round by which every class has been drawn"] = complete
        curves: dict[str, list[list[float]]] = {}
        for place, name in enumerate(self.methods):

            def on_round(record: RoundRecord, place: int = place, name: str = name) -> None:
                share = (place + record.number / self.rounds) / len(self.methods)
                task.tell(share, f"{name}: {100 * record.accuracy:.1f} after {record.number} of {self.rounds} rounds")

            run = self.run(name, task.seed)
            path = cache_folder() / "rounds" / f"{self._identity(dataset, name, task)}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                history = run(model, clients, test, path, on_round)
            except DivergedError as error:
                history = error.history
                numbers[f"{name}: round in which training diverges"] = len(history.records) + 1
            numbers |= self._numbers(name, history, complete)
            curves[name] = [[r.number, 100 * r.accuracy] for r in history.records]
        return Found(numbers, [Lines("Accuracy of the global model", "round", "per cent", curves)])

    def _identity(self, dataset: Dataset, name: str, task: Task) -> str:
        """Of the cache: a run that was stopped goes on, as long as code and settings are the same."""
        settings = {**asdict(self), "methods": asdict(self.methods[name])}  # rounds too: fewer rounds are another run
        return digest(settings, task.seed, dataset.digest, Code.of(type(self), *self.rows).digest, task.device)

    def _numbers(self, name: str, history: History, complete: int | None) -> dict[str, float]:
        found: dict[str, float] = {}
        for first, last in self.means:
            if last > len(history.records):  # it has diverged
                continue
            within = history.accuracies[first - 1 : last]
            found[f"{name}: mean of rounds {first} to {last}"] = 100 * sum(within) / len(within)
            found[f"{name}: lowest of rounds {first} to {last}"] = 100 * min(within)
        if complete is not None and len(history.records) == self.rounds:
            lowest = min(history.accuracies[complete - 1 :])
            found[f"{name}: lowest from the round on by which every class has been drawn"] = 100 * lowest
        for level in LEVELS:
            rounds, sent = history.rounds_to(level / 100), history.bytes_to(level / 100)
            if rounds is not None and sent is not None:
                found[f"{name}: rounds to {level} per cent"] = rounds
                found[f"{name}: MB that a client in every round uploads until then, {level} per cent"] = sent / 1e6
        seconds = [record.training + record.merging for record in history.records]
        if seconds:
            found[f"{name}: seconds of a round, without the test"] = sum(seconds) / len(seconds)
        return found

    def _first_with_all_classes(self, parts: list[torch.Tensor], dataset: Dataset, seed: int) -> int | None:
        run, classes = self.run(next(iter(self.methods)), seed), set(dataset.y_train.tolist())
        held = [set(dataset.y_train[part].tolist()) for part in parts]
        seen: set[int] = set()
        for number in range(1, self.rounds + 1):
            seen |= {label for client in run.sample(number, self.clients) for label in held[client]}
            if seen == classes:
                return number
        return None
