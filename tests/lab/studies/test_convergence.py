"""Proposition 2: the bound is that of the proof, distances are right, and other step sizes are noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maecho.lab import charts
from maecho.lab.studies import convergence
from maecho.lab.studies.convergence import Clients, Convergence, bound, project, pull, slope, step_size
from maecho.lab.studies.directions import Direction
from maecho.lab.studies.found import Found, Task

STUDY = Convergence(rounds=300, runs=3, points=25)


def test_the_bound_is_what_the_recursion_of_the_proof_gives() -> None:
    """Its Eq. (23) round by round, from any distance, with the step sizes as they are printed."""
    c, G, M, square = 1.3, 2.0, 5.0, 1e6
    for k in range(2000):
        size, share = step_size(k, c), pull(k)
        factor = 1 - c * size + share
        assert factor >= -1e-12
        square = factor * square + share * G**2 + 2 * size**2 * M**2 + 2 * share**2 * G**2
        assert square <= bound(k, G, M, c) * (1 + 1e-9)
        assert bound(k, G, M, c) < 4 * square, "and it is not far above"
    assert bound(2000, G, M, c) == pytest.approx(bound(200, G, M, c) / 10, rel=0.02)


def on_simplex(w: np.ndarray) -> np.ndarray:
    """The projection on the probability simplex, by sorting."""
    falling = np.sort(w)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(w) + 1)
    found: np.ndarray = np.maximum(w - excess[falling > excess][-1], 0)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_the_next_point_of_the_pareto_set(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(6)
    np.testing.assert_allclose(project(w, np.eye(6)), on_simplex(w), atol=1e-12)
    centres = rng.standard_normal((4, 9))
    inside = rng.dirichlet(np.ones(4)) @ centres
    np.testing.assert_allclose(project(inside, centres), inside, atol=1e-12)
    far = rng.standard_normal(9)
    found = project(far, centres)
    # What makes it a projection: no point of the set lies on the other side.
    assert ((centres - found) @ (far - found)).max() < 1e-6


def test_the_direction_is_that_of_proposition_1() -> None:
    rng = np.random.default_rng(0)
    clients = Clients.draw(5, 8, 3, 4.0, rng)
    which, w = [0, 2, 3], rng.standard_normal(8)
    models = rng.standard_normal((3, 8))
    dense = np.stack([2 * clients.bases[i] @ clients.bases[i].T @ (w - v) for i, v in zip(which, models, strict=True)])
    np.testing.assert_allclose(
        clients.direction(w, models, which), Direction.of(torch.from_numpy(dense), 1.0).d.numpy(), atol=1e-9
    )
    assert np.linalg.eigvalsh(clients.curvature)[[0, -1]] == pytest.approx([1, 4])

    # The gradient, against differences of the loss.
    def loss(w: np.ndarray) -> float:
        return float(0.5 * (w - clients.centres[2]) @ clients.curvature @ (w - clients.centres[2]))

    steps = 1e-6 * np.eye(8)
    slopes = [(loss(w + step) - loss(w - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(clients.gradients(w, [2])[0], slopes, atol=1e-6)


@pytest.fixture(scope="module")
def found() -> Found:
    return STUDY(Task(0))


def test_what_the_proposition_says(found: Found) -> None:
    for condition in (1, 4):
        assert found.numbers[f"condition {condition}: rounds under the bound, per cent"] == 100
        assert found.numbers[f"condition {condition}: rounds of single runs under the bound, per cent"] == 100
    assert found.numbers["condition 1: rounds that meet the proof's assumption, per cent"] == 100
    assert found.numbers["condition 1: slope of log distance² over log k"] < -1
    assert -1.6 < found.numbers["condition 4: slope of log distance² over log k"] < -0.7
    for chart in found.charts:
        assert isinstance(chart, charts.Lines)
        below, above = chart.series.values()
        assert len(below) > 15
        assert all(low[1] <= high[1] for low, high in zip(below, above, strict=True))


def test_steps_that_do_not_shrink_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With λ that stays as it is, the distance does not fall, and leaves the bound behind in the end."""
    monkeypatch.setattr(convergence, "step_size", lambda k, c: 0.4 / c)
    numbers = Convergence(rounds=300, runs=3, points=25, conditions=(4.0,))(Task(0)).numbers
    assert numbers["condition 4: slope of log distance² over log k"] > -0.4


def test_a_direction_that_is_not_bounded_by_its_share_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "pull", lambda k: 0.9)
    numbers = Convergence(rounds=300, runs=3, points=25, conditions=(1.0,))(Task(0)).numbers
    assert numbers["condition 1: largest share of the bound"] > 1e-3


def test_a_slope() -> None:
    rounds = [1, 10, 100, 1000]
    assert slope(rounds, np.array([5.0, 9.0, 1e-4, 1e-6])) == pytest.approx(-2)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="clients must be at least sampled ≥ 2 and fewer than size"):
        Convergence(clients=30)
    with pytest.raises(ValueError, match="rounds at least 60"):
        Convergence(rounds=10)
    with pytest.raises(ValueError, match="conditions must be numbers from 1 on"):
        Convergence(conditions=(0.5,))
