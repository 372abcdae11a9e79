"""How unevenly a Dirichlet split shares the classes out (Figure 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from maecho.lab import partition
from maecho.lab.charts import Bubbles
from maecho.lab.harness.streams import stream
from maecho.lab.studies.found import Found, Task

FEW = 10
"""A client holds a class if it has so many examples of it, as in the release."""


@dataclass(frozen=True)
class Partitions:
    """The examples of each class that each client holds, for several β."""

    data: str = "mnist"
    clients: int = 10
    betas: tuple[float, ...] = (0.01, 0.95, 20.0)

    def __post_init__(self) -> None:
        if self.clients < 2:
            raise ValueError(f"clients must be at least 2, got {self.clients}")
        if not self.betas or not all(0 < beta < math.inf for beta in self.betas):
            raise ValueError(f"betas must be positive numbers, got {list(self.betas)}")

    @property
    def rows(self) -> tuple[Any, ...]:
        return ()

    def __call__(self, task: Task) -> Found:
        labels, classes = task.data.y_train.numpy(), task.data.classes
        numbers, charts = {}, []
        for place, beta in enumerate(self.betas):
            task.tell(place / len(self.betas), f"β = {beta:g}")
            # The split of the tables: the same stream as `Streams.partition`, without what that needs beside it.
            cell = {"clients": self.clients, "beta": beta}
            rng = np.random.default_rng(stream("partition", data=self.data, split=cell, seed=task.seed))
            parts = partition.dirichlet(labels, self.clients, beta, rng)
            counts = partition.class_counts(labels, parts, classes).tolist()
            charts.append(Bubbles(f"β = {beta:g}", "class", "client", counts))
            numbers[f"classes that a client holds, β = {beta:g}"] = fmean(
                sum(count >= FEW for count in row) for row in counts
            )
            numbers[f"overlap of two clients in per cent, β = {beta:g}"] = 100 * overlap(counts)
        return Found(numbers, charts)


def overlap(counts: Sequence[Sequence[int]]) -> float:
    """The mean over pairs of clients of Σ_k min(p_k, q_k), where p and q are the shares of classes in their data. It is
    1 for equal shares and 0 for clients without a common class."""
    shares = [[count / sum(row) for count in row] for row in counts]
    return fmean(sum(map(min, p, q)) for p, q in combinations(shares, 2))
