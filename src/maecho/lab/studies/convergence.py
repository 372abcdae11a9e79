"""Many rounds of MA-Echo on strongly convex clients, and the bound of Proposition 2.

Client i has L_i(w) = ½ (w − a_i)ᵀ A (w − a_i). All share A, so the Pareto set is the convex hull of the a_i. A round
samples clients, takes one full gradient step each, and aggregates:

    w ← w − λ_k ĝ_k + η_k d̂_k,    λ_k = 3 / (c (k + 2)),    η_k = 1 / ((k + 1) (k + 2))

    E ‖w − w*‖² ≤ [2 / ((k + 1) (k + 2)) + 1 / (2 (k + 2))] G² + 18 M² / (c² (k + 2))                         Eq. (21)

with ‖ĝ_k‖ ≤ M and ‖d̂_k‖ ≤ G. The proof assumes ⟨w − w*, ĝ_k⟩ ≥ ½ c ‖w − w*‖². With A = σ I that holds in every round
for c = σ (1 + 1/m), where m clients are sampled. With another A it holds in most rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maecho.lab.charts import Lines
from maecho.lab.harness.streams import stream
from maecho.lab.studies.found import Found, Task
from maecho.linalg.simplex import capped_simplex

Vector = np.ndarray
FIRST_FITTED = 30
"""The slope is fitted from this round on."""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Strongly convex clients with a common curvature."""

    centres: np.ndarray
    """The a_i, [N, size]."""
    curvature: np.ndarray
    """A, [size, size]. Its smallest eigenvalue is σ = 1."""
    bases: np.ndarray
    """Orthonormal bases of the spans of the clients' data, [N, size, rank]; P_i = U_i U_iᵀ."""

    @classmethod
    def draw(cls, n: int, size: int, rank: int, condition: float, rng: np.random.Generator) -> Clients:
        Q = np.linalg.qr(rng.standard_normal((size, size)))[0]
        A = (Q * np.geomspace(1.0, condition, size)) @ Q.T
        bases = np.linalg.qr(rng.standard_normal((n, size, rank)))[0]
        return cls(centres=rng.standard_normal((n, size)), curvature=A, bases=bases)

    def gradients(self, w: Vector, which: Sequence[int]) -> np.ndarray:
        found: np.ndarray = (w - self.centres[which]) @ self.curvature
        return found

    def direction(self, w: Vector, models: np.ndarray, which: Sequence[int]) -> Vector:
        """d̂ = −Σ 2 α_i P_i (w − v_i), with the α of Eq. (6)."""
        pulls = np.stack([2 * U @ (U.T @ (w - v)) for U, v in zip(self.bases[which], models, strict=True)])
        found: Vector = -(capped_simplex(pulls @ pulls.T) @ pulls)
        return found


def project(w: Vector, centres: np.ndarray) -> Vector:
    """The point of the Pareto set that is next to w: min ‖w − Σ α_i a_i‖ over the simplex."""
    gaps = centres - w
    alpha = capped_simplex(gaps @ gaps.T)
    # The quadratic program says which a_i count. Least squares on these gives the point to full precision.
    used = alpha > 0
    kept = centres[used]
    rows = (kept[1:] - kept[0]).T
    shares = np.linalg.lstsq(rows, w - kept[0], rcond=None)[0]
    exact = bool((shares >= 0).all()) and float(shares.sum()) <= 1
    found: Vector = kept[0] + rows @ shares if exact else alpha @ centres
    return found


def step_size(k: int, c: float) -> float:
    """λ_k"""
    return 3 / (c * (k + 2))


def pull(k: int) -> float:
    """η_k"""
    return 1 / ((k + 1) * (k + 2))


def bound(k: int, G: float, M: float, c: float) -> float:
    """The right side of Eq. (21), for w after round k, where rounds count from 0."""
    return (2 / ((k + 1) * (k + 2)) + 1 / (2 * (k + 2))) * G**2 + 18 * M**2 / (c**2 * (k + 2))


@dataclass(frozen=True)
class Path:
    """One run: the squared distance after each round that is looked at, and what the bound needs."""

    squares: list[float]
    gradient: float
    """The largest ‖ĝ_k‖."""
    direction: float
    """The largest ‖d̂_k‖."""
    assumed: float
    """The share of the rounds looked at in which the proof's assumption holds."""


def run(clients: Clients, start: Vector, sampled: int, c: float, watched: Sequence[int], rng: Any) -> Path:
    """Rounds up to the last of `watched`."""
    w, wanted = start, set(watched)
    squares, holds, M, G = [], [], 0.0, 0.0
    for k in range(max(watched) + 1):
        which = rng.choice(len(clients.centres), sampled, replace=False)
        gradients = clients.gradients(w, which)
        mean, size = gradients.mean(0), step_size(k, c)
        if k in wanted:
            gap = w - project(w, clients.centres)
            holds.append(float(gap @ mean) >= (c / 2 - 1e-9) * float(gap @ gap))
        middle = w - size * mean
        d = clients.direction(middle, w - size * gradients, which)
        M, G = max(M, float(np.linalg.norm(mean))), max(G, float(np.linalg.norm(d)))
        w = middle + pull(k) * d
        if k in wanted:
            squares.append(float(np.square(w - project(w, clients.centres)).sum()))
    return Path(squares, M, G, float(np.mean(holds)))


@dataclass(frozen=True)
class Convergence:
    """The distance to the Pareto set over rounds, beside the bound."""

    clients: int = 10
    sampled: int = 3
    size: int = 20
    """How many numbers w has."""
    rank: int = 5
    conditions: tuple[float, ...] = (1.0, 4.0)
    """Largest eigenvalues of A."""
    rounds: int = 2000
    runs: int = 16
    """The mean over so many runs stands for the expectation."""
    points: int = 40

    def __post_init__(self) -> None:
        if not 2 <= self.sampled <= self.clients < self.size:
            raise ValueError(
                f"clients must be at least sampled ≥ 2 and fewer than size, got clients {self.clients}, sampled "
                f"{self.sampled}, size {self.size}"
            )
        if not 1 <= self.rank <= self.size or self.rounds < 2 * FIRST_FITTED or min(self.runs, self.points - 1) < 1:
            raise ValueError(
                f"rank must be at most size, rounds at least {2 * FIRST_FITTED}, runs and points positive, got "
                f"{self.rank}, {self.rounds}, {self.runs}, {self.points}"
            )
        if not self.conditions or not all(1 <= condition < math.inf for condition in self.conditions):
            raise ValueError(f"conditions must be numbers from 1 on, got {list(self.conditions)}")

    @property
    def data(self) -> str:
        return ""

    @property
    def rows(self) -> tuple[Any, ...]:
        return ()

    def __call__(self, task: Task) -> Found:
        c = 1 + 1 / self.sampled
        watched = sorted({round(k) for k in np.geomspace(1, self.rounds - 1, self.points)})
        numbers: dict[str, float] = {}
        charts = []
        for place, condition in enumerate(self.conditions):
            rng = np.random.default_rng(stream("convergence", condition=condition, seed=task.seed))
            clients = Clients.draw(self.clients, self.size, self.rank, condition, rng)
            start = 3 * rng.standard_normal(self.size)
            paths = []
            for i in range(self.runs):
                done = (place + i / self.runs) / len(self.conditions)
                task.tell(done, f"run {i + 1} of {self.runs}, condition {condition:g}")
                paths.append(run(clients, start, self.sampled, c, watched, rng))
            mean = np.mean([path.squares for path in paths], 0)
            M, G = max(path.gradient for path in paths), max(path.direction for path in paths)
            bounds = np.array([bound(k, G, M, c) for k in watched])
            every = np.array([path.squares for path in paths])
            words = f"condition {condition:g}"
            numbers |= {
                f"{words}: rounds under the bound, per cent": 100 * float((mean <= bounds).mean()),
                f"{words}: rounds of single runs under the bound, per cent": 100 * float((every <= bounds).mean()),
                f"{words}: slope of log distance² over log k": slope(watched, mean),
                f"{words}: largest share of the bound": float((mean / bounds).max()),
                f"{words}: distance² after the last round": float(mean[-1]),
                f"{words}: rounds that meet the proof's assumption, per cent": 100
                * float(np.mean([path.assumed for path in paths])),
            }
            series = {"distance², mean of the runs": mean, "bound": bounds}
            charts.append(
                Lines(
                    f"Distance to the Pareto set, {words}", "log10 of the round", "log10 of distance²",
                    {name: [[math.log10(k), _log10(y)] for k, y in zip(watched, heights, strict=True)]
                     for name, heights in series.items()},
                )
            )  # fmt: skip
        return Found(numbers, charts)


def slope(rounds: Sequence[int], heights: np.ndarray) -> float:
    """The slope of a line through (log k, log height) from round FIRST_FITTED on."""
    late = np.array(rounds) >= FIRST_FITTED
    return float(np.polyfit(np.log(np.array(rounds)[late]), np.log(np.maximum(heights[late], 1e-300)), 1)[0])


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-300))
