"""The neurons of one layer of all clients, as t-SNE maps them: before, after OT, and during MA-Echo (Figure 5).

A neuron is a row of the layer's weights. Two clients' neurons of one number match if each lies next to the other. Only
this file uses scikit-learn's t-SNE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean

import numpy as np
from torch import Tensor

from maecho.aggregation.ma_echo import Iteration, MAEcho
from maecho.alignment.transport import Alignment
from maecho.errors import InputError
from maecho.lab.charts import Scatter
from maecho.lab.harness.clients import Cohort
from maecho.lab.studies.clients import Clients, accuracy, own_examples
from maecho.lab.studies.found import Found, Task

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Neurons(Clients):
    """Where the neurons of the clients lie, and how well the clients' models still do on their own data."""

    layer: str = "fc3"
    steps: tuple[int, ...] = (1, 30)
    """The steps of MA-Echo that are shown."""
    perplexity: float = 30.0
    examples: int = 2000
    """How many of its own examples a client's accuracy is measured on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.steps or sorted(set(self.steps)) != list(self.steps) or self.steps[0] < 0:
            raise ValueError(f"steps must be a rising list of whole numbers, got {list(self.steps)}")
        if not self.perplexity > 0 or self.examples < 1:
            raise ValueError(f"perplexity and examples must be positive, got {self.perplexity} and {self.examples}")

    def __call__(self, task: Task) -> Found:
        cohort = self.cohort(task)
        uploads = self.uploads(cohort, self.trained(cohort, task, 0.5))
        layer = next((one for one in uploads[0].layers if one.name == self.layer), None)
        if layer is None:
            names = ", ".join(one.name for one in uploads[0].layers)
            raise InputError(f"layer must be among {names}, got {self.layer!r}")
        panels: dict[str, list[Weights]] = {
            "original": [upload.weights for upload in uploads],
            "after OT": [upload.weights for upload in Alignment().align(uploads)],
        }

        def watch(iteration: Iteration) -> None:
            if iteration.step in self.steps:
                panels[f"MA-Echo, step {iteration.step}"] = [*map(iteration.client, range(self.clients))]

        MAEcho(steps=self.steps[-1], watch=watch)(uploads)
        numbers: dict[str, float] = {}
        charts = []
        for turn, (name, weights) in enumerate(panels.items()):
            task.tell(0.5 + 0.5 * turn / len(panels), f"maps the neurons, {name}")
            rows = [layer.matrix(one)[0].cpu().numpy() for one in weights]
            right = self._accuracy(cohort, weights)
            numbers |= {
                f"{name}: accuracy of the clients' models on their own data": right,
                f"{name}: neurons that match, per cent": 100 * matched(rows),
                f"{name}: distance of a neuron from its match, as a share of its length": apart(rows),
            }
            places = _mapped(rows, self.perplexity, task.seed)
            groups = {f"client {i + 1}": part.tolist() for i, part in enumerate(np.split(places, self.clients))}
            charts.append(Scatter(f"{name} ({right:.2f})", "", "", groups))
        return Found(numbers, charts)

    def _accuracy(self, cohort: Cohort, weights: Sequence[Weights]) -> float:
        """The mean over clients."""
        return fmean(
            accuracy(self.model(one), *own_examples(cohort, i, self.examples)) for i, one in enumerate(weights)
        )


def matched(rows: Sequence[np.ndarray]) -> float:
    """Over all pairs of clients: the share of one's neurons whose nearest neuron of the other has the same number."""
    shares = []
    for one, other in permutations(rows, 2):
        squares = np.square(one).sum(1)[:, None] + np.square(other).sum(1) - 2 * one @ other.T
        shares.append(float((squares.argmin(1) == np.arange(len(one))).mean()))
    return fmean(shares)


def apart(rows: Sequence[np.ndarray]) -> float:
    """The distance between neurons of one number of two clients, as a share of the length of a neuron: both as root
    mean squares."""
    gaps = [np.square(one - other).sum(1).mean() for one, other in permutations(rows, 2)]
    lengths = [np.square(one).sum(1).mean() for one in rows]
    return float(np.sqrt(np.mean(gaps) / np.mean(lengths)))


def _mapped(rows: Sequence[np.ndarray], perplexity: float, seed: int) -> np.ndarray:
    """The rows of all clients on one plane."""
    from sklearn.manifold import TSNE

    together = np.concatenate(rows).astype(np.float64)
    near = min(perplexity, (len(together) - 1) / 3)
    found: np.ndarray = TSNE(2, perplexity=near, init="pca", random_state=seed).fit_transform(together)
    return found.astype(np.float64).round(3)
