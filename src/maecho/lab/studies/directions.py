"""The common direction on real layers (Proposition 1).

For one layer with objectives f_i(W) = ⟨W − V_i, (W − V_i) P_i⟩, gradients g_i = 2 (W − V_i) P_i and a cap C,

    min_{d, v, ε}  v + ½ ‖d‖² + C Σ_i ε_i    s.t. ⟨g_i, d⟩ ≤ v + ε_i, ε_i ≥ 0                             Eq. (5)

has the solution d = −Σ α_i g_i with the α of Eq. (6), and then ⟨g_i, d⟩ ≤ −‖d‖² + ε_i − C Σ_n ε_n           Eq. (12)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from maecho.aggregation.ma_echo import Iteration, MAEcho
from maecho.lab.charts import Lines
from maecho.lab.studies.clients import Clients
from maecho.lab.studies.found import Found, Task
from maecho.linalg.simplex import capped_simplex
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal
from maecho.upload.upload import Upload

TOLERANCE = 1e-4
"""Of inner products with d, as a share of ‖d‖². The quadratic program is solved more exactly than that."""
HALF = 0.5
"""A step along d. With C = 1 every objective falls by at least η (1 − η) ‖d‖², as long as η < 1."""
POINTS = 21


@dataclass(frozen=True)
class Direction:
    """The solution of Eq. (5) for one layer and one cap."""

    cap: float
    alpha: Tensor
    d: Tensor
    slopes: Tensor
    """⟨g_i, d⟩: how fast each objective changes along d."""
    v: float

    @classmethod
    def of(cls, gradients: Tensor, cap: float) -> Direction:
        """From the clients' gradients [N, …] in float64."""
        flat = gradients.flatten(1)
        alpha = torch.from_numpy(capped_simplex((flat @ flat.T).numpy(), cap))
        d = -(alpha @ flat)
        slopes = flat @ d
        # KKT: ε_i = 0 wherever α_i < C, so v is the largest slope there. If all weights are at C, every v up to the
        # smallest slope is optimal.
        free = alpha < cap * (1 - 1e-9)
        v = slopes[free].max() if bool(free.any()) else slopes.min()
        return cls(cap, alpha, d.reshape(gradients.shape[1:]), slopes, float(v))

    @property
    def square(self) -> float:
        """‖d‖²"""
        return float(self.d.square().sum())

    @property
    def slack(self) -> Tensor:
        """ε_i: how much each client is let off."""
        return (self.slopes - self.v).clamp(min=0)

    @property
    def gap(self) -> float:
        """How far v + C Σ ε_n is from −‖d‖², as a share of ‖d‖². The proof needs 0. A wrong α, d, v or ε ends it."""
        return abs(self.v + self.cap * float(self.slack.sum()) + self.square) / self.square

    @property
    def falls(self) -> float:
        """The share of objectives that fall along d."""
        return float((self.slopes < -TOLERANCE * self.square).double().mean())

    @property
    def rises(self) -> float:
        return float((self.slopes > TOLERANCE * self.square).double().mean())

    @property
    def given_up(self) -> float:
        """The share of clients that are let off: ε_i > 0."""
        return float((self.slack > TOLERANCE * self.square).double().mean())


@dataclass(frozen=True)
class Problem:
    """One layer: W, the clients' V_i and P_i, in float64."""

    name: str
    W: Tensor
    V: Sequence[Tensor]
    P: Sequence[Spectrum | Diagonal]

    @classmethod
    def of(cls, method: MAEcho, uploads: Sequence[Upload], place: int) -> Problem:
        """At the start of MA-Echo: W is the average, and V_i is W_i."""
        layer = uploads[0].layers[place]
        V = [layer.matrix(upload.weights).double() for upload in uploads]
        return cls(layer.name, sum(V[1:], V[0]) / len(V), V, [method.spectrum(u, layer.name) for u in uploads])

    def gradients(self) -> Tensor:
        return torch.stack([2 * P.after(self.W - V) for V, P in zip(self.V, self.P, strict=True)])

    def objectives(self, W: Tensor) -> Tensor:
        """The f_i at W."""
        pairs = zip(self.V, self.P, strict=True)
        return torch.stack([((W - V) * P.after(W - V)).sum() for V, P in pairs])


@dataclass(frozen=True, kw_only=True)
class Directions(Clients):
    """What C does: which objectives fall along d, and which are given up."""

    clients: int = 5
    projectors: tuple[Literal["batch-mean", "exact"], ...] = ("batch-mean", "exact")
    damping: float = 1e-3
    caps: int = 9
    """How many values of C, from 1/N to 1, each by the same factor larger than the last."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.caps < 3:
            raise ValueError(f"caps must be at least 3, got {self.caps}")
        if not self.projectors:
            raise ValueError("projectors must be one or more, got none")
        self.method(self.projectors[0])

    def method(self, projector: Literal["batch-mean", "exact"], **more: Any) -> MAEcho:
        """One printed step with the quadratic program and C = 1."""
        return MAEcho(
            form="printed",
            alpha="qp",
            steps=1,
            step_size=HALF,
            projector=projector,
            damping=self.damping,
            head="iterate",
            **more,
        )

    def __call__(self, task: Task) -> Found:
        cohort = self.cohort(task)
        uploads = self.uploads(cohort, self.trained(cohort, task, 0.6))
        caps = [self.clients ** (k / (self.caps - 1) - 1) for k in range(self.caps)]
        numbers: dict[str, float] = {}
        charts: list[Lines] = []
        for turn, projector in enumerate(self.projectors):
            task.tell(0.6 + 0.4 * turn / len(self.projectors), f"solves with the {projector} projectors")
            method = self.method(projector)
            problems = [Problem.of(method, uploads, k) for k in range(len(uploads[0].layers))]
            found = {
                problem.name: [Direction.of(gradients, cap) for cap in caps]
                for problem in problems
                for gradients in [problem.gradients()]
            }
            taken = self._step(projector, uploads)
            numbers |= {f"{projector}, {what}": value for what, value in self._numbers(problems, found, taken).items()}
            charts += self._charts(projector, problems[0], found, caps)
        return Found(numbers, charts)

    def _numbers(
        self, problems: Sequence[Problem], found: dict[str, list[Direction]], taken: dict[str, Tensor]
    ) -> dict[str, float]:
        ends = [(one[0], one[-1]) for one in found.values()]
        between = [direction for one in found.values() for direction in one[1:-1]]
        steps = [
            problem.objectives(problem.W + HALF * free.d) / problem.objectives(problem.W)
            for problem, (_, free) in zip(problems, ends, strict=True)
        ]
        apart = [float((taken[name] - one[-1].d).norm() / one[-1].d.norm()) for name, one in found.items()]
        everything = [direction for one in found.values() for direction in one]
        return {
            "C = 1: objectives that fall along d, per cent": 100 * fmean(free.falls for _, free in ends),
            "C = 1: largest slope of an objective, in units of ‖d‖²": max(
                float(free.slopes.max()) / free.square for _, free in ends
            ),
            "C = 1: objectives lower after a step of 1/2, per cent": 100
            * fmean(float((one < 1).double().mean()) for one in steps),
            "C between: clients that are given up, per cent": 100 * fmean(one.given_up for one in between),
            "C between: objectives that rise along d, per cent": 100 * fmean(one.rises for one in between),
            "C = 1/N: largest difference of α from 1/N": max(
                float((equal.alpha - 1 / self.clients).abs().max()) for equal, _ in ends
            ),
            "C = 1/N: objectives that fall along d, per cent": 100 * fmean(equal.falls for equal, _ in ends),
            "largest gap in Eq. (12), as a share of ‖d‖²": max(one.gap for one in everything),
            "d of the library's step differs by, as a share of ‖d‖": max(apart),
        }

    def _step(self, projector: Literal["batch-mean", "exact"], uploads: Sequence[Upload]) -> dict[str, Tensor]:
        """d by the library: what a step of MA-Echo with C = 1 adds to W."""
        states = []

        def watch(iteration: Iteration) -> None:
            merged = iteration.merged()
            states.append({layer.name: layer.matrix(merged).double() for layer in uploads[0].layers})

        self.method(projector, watch=watch)(uploads)
        before, after = states
        return {name: (after[name] - before[name]) / HALF for name in before}

    def _charts(
        self, projector: str, first: Problem, found: dict[str, list[Direction]], caps: Sequence[float]
    ) -> list[Lines]:
        directions = found[first.name]
        weights = {
            f"client {i + 1}": [[one.cap, float(one.alpha[i])] for one in directions] for i in range(self.clients)
        }
        ahead = [k / (POINTS - 1) for k in range(POINTS)]
        d = directions[-1].d
        heights = torch.stack([first.objectives(first.W + eta * d) for eta in ahead]) / first.objectives(first.W)
        along = {
            f"client {i + 1}": [[eta, float(height[i])] for eta, height in zip(ahead, heights, strict=True)]
            for i in range(self.clients)
        }
        return [
            Lines(f"Objectives that fall along d, {projector}", "C", "per cent", _over(found, caps, "falls")),
            Lines(f"Clients that are given up (ε > 0), {projector}", "C", "per cent", _over(found, caps, "given_up")),
            Lines(
                f"The weights of the clients, {first.name}, {projector}", "C", "α", weights, {"1/N": 1 / self.clients}
            ),
            Lines(f"The objectives along d with C = 1, {first.name}, {projector}", "η", "f(W + η d) / f(W)", along),
        ]


def _over(found: dict[str, list[Direction]], caps: Sequence[float], what: str) -> dict[str, list[list[float]]]:
    return {
        name: [[cap, 100 * getattr(one, what)] for cap, one in zip(caps, directions, strict=True)]
        for name, directions in found.items()
    }
