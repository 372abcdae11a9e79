"""Proposition 1: our direction solves Eq. (5), and the study says so of real layers; a wrong direction shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from maecho.lab import charts, data
from maecho.lab.studies import directions
from maecho.lab.studies.directions import Direction, Directions
from maecho.lab.studies.found import Found, Task
from maecho.lab.training import LocalTraining

STUDY = Directions(
    data="digits", network="digits-mlp", init="same", caps=5,
    training=LocalTraining(epochs=3, learning_rate=0.05, batch_size=16),
)  # fmt: skip
KINDS = ("batch-mean", "exact")


def gradients(n: int, size: int, seed: int) -> Tensor:
    """Random gradients with a common part, so that no point is Pareto critical."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator, dtype=torch.float64)
    return common + torch.randn(n, size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cap", [0.25, 0.3, 0.5, 1.0])
def test_the_direction_solves_the_primal_problem(cap: float, seed: int) -> None:
    """Eq. (5), minimised over d, v and ε by another solver."""
    g = gradients(4, 3, seed)
    ours = Direction.of(g, cap)

    def goal(x: np.ndarray) -> float:
        return float(x[3] + 0.5 * x[:3] @ x[:3] + cap * x[4:].sum())

    limits = [
        {"type": "ineq", "fun": lambda x: x[3] + x[4:] - g.numpy() @ x[:3]},
        {"type": "ineq", "fun": lambda x: x[4:]},
    ]
    theirs = minimize(goal, np.zeros(8), constraints=limits, method="SLSQP", options={"ftol": 1e-13, "maxiter": 1000})
    np.testing.assert_allclose(ours.d.numpy(), theirs.x[:3], atol=1e-4)
    value = ours.v + 0.5 * ours.square + cap * float(ours.slack.sum())
    assert value == pytest.approx(theirs.fun, abs=1e-6)
    assert ours.gap < 1e-6
    # Eq. (12)
    right = -ours.square + ours.slack - cap * ours.slack.sum()
    assert bool((ours.slopes <= right + 1e-6).all())


def test_the_two_ends() -> None:
    g = gradients(5, 8, 0)
    free, equal = Direction.of(g, 1.0), Direction.of(g, 0.2)
    assert free.falls == 1
    assert free.given_up == 0
    assert float(free.slopes.max()) == pytest.approx(-free.square, rel=1e-6)
    torch.testing.assert_close(equal.alpha, torch.full((5,), 0.2, dtype=torch.float64))
    torch.testing.assert_close(equal.d, -g.mean(0))


def test_a_client_against_the_others_is_given_up() -> None:
    """Two clients pull one way, the third the other. With C = 1 the three can agree on a small step; a smaller C
    cannot give the third the weight that this needs."""
    g = torch.tensor([[4.0, 1.0], [4.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    free, capped = Direction.of(g, 1.0), Direction.of(g, 0.5)
    assert (free.falls, free.given_up) == (1, 0)
    assert (capped.rises, capped.given_up) == (1 / 3, 1 / 3)
    assert float(capped.alpha[2]) == pytest.approx(0.5)


def test_at_a_pareto_critical_point_there_is_no_direction() -> None:
    g = torch.tensor([[1.0, 2.0], [-2.0, -4.0]], dtype=torch.float64)
    assert Direction.of(g, 1.0).square == pytest.approx(0, abs=1e-12)


@pytest.fixture
def found() -> Found:
    return STUDY(Task(0, data.digits()))


@pytest.mark.parametrize("kind", KINDS)
def test_real_layers(found: Found, kind: str) -> None:
    numbers = {name.removeprefix(f"{kind}, "): value for name, value in found.numbers.items() if name.startswith(kind)}
    assert numbers["C = 1: objectives that fall along d, per cent"] == 100
    assert numbers["C = 1: objectives lower after a step of 1/2, per cent"] == 100
    assert numbers["C = 1: largest slope of an objective, in units of ‖d‖²"] == pytest.approx(-1, abs=1e-4)
    assert numbers["C = 1/N: largest difference of α from 1/N"] < 1e-9
    if kind == "batch-mean":
        assert numbers["C between: clients that are given up, per cent"] > 0
    else:
        assert numbers["C = 1/N: objectives that fall along d, per cent"] < 100
    assert numbers["largest gap in Eq. (12), as a share of ‖d‖²"] < 1e-4
    assert numbers["d of the library's step differs by, as a share of ‖d‖"] < 1e-3
    falls, given_up, weights, along = (one for one in found.charts if one.title.endswith(kind))
    assert isinstance(falls, charts.Lines)
    assert isinstance(given_up, charts.Lines)
    assert isinstance(weights, charts.Lines)
    assert isinstance(along, charts.Lines)
    assert list(falls.series) == list(given_up.series) == ["fc1", "fc2", "fc3"]
    for points in falls.series.values():
        assert [x for x, _ in points] == pytest.approx([0.2, 0.2 * 5**0.25, 0.2 * 5**0.5, 0.2 * 5**0.75, 1])
        assert points[-1][1] == 100
    for points in given_up.series.values():
        assert points[-1][1] == 0
    for curve in along.series.values():
        heights = [y for _, y in curve]
        assert heights[0] == 1
        assert heights[:11] == sorted(heights[:11], reverse=True), "it falls up to η = 1/2"


def test_another_direction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal weights in place of the solution, the statements of the proposition fail."""
    monkeypatch.setattr(directions, "capped_simplex", lambda Q, cap=1.0: np.full(len(Q), 1 / len(Q)))
    numbers = STUDY(Task(0, data.digits())).numbers
    for kind in KINDS:
        assert numbers[f"{kind}, C = 1: largest slope of an objective, in units of ‖d‖²"] > -0.99
        assert numbers[f"{kind}, d of the library's step differs by, as a share of ‖d‖"] > 0.01
        assert numbers[f"{kind}, largest gap in Eq. (12), as a share of ‖d‖²"] > 0.01


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="caps must be at least 3, got 2"):
        Directions(caps=2)
    with pytest.raises(ValueError, match="damping must be positive"):
        Directions(damping=0.0)
    with pytest.raises(ValueError, match=r"network must be among .*, got 'mpl'"):
        Directions(network="mpl")
    with pytest.raises(ValueError, match="clients must be at least 2, got 1"):
        Directions(clients=1)
    with pytest.raises(ValueError, match="beta must be positive and finite, got 0"):
        Directions(beta=0.0)
