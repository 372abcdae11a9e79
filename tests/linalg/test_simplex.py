"""The quadratic program: optimal by its KKT conditions on a zoo of singular and badly scaled Gram matrices."""

import numpy as np
import pytest
from numpy.typing import NDArray

from maecho.linalg import simplex as qp
from maecho.linalg.simplex import capped_simplex

Array = NDArray[np.float64]

ZOO = ["full", "low rank", "rank one", "zero", "one zero row", "duplicated", "nearly duplicated", "graded", "float32"]


def gram(rng: np.random.Generator, kind: str, n: int) -> Array:
    rank = {"low rank": max(1, n // 3), "rank one": 1}.get(kind, 2 * n)
    G = rng.standard_normal((n, rank)) + rng.choice([0, 2]) * rng.standard_normal(rank)
    if kind == "zero":
        G[:] = 0
    if kind == "one zero row":
        G[rng.integers(n)] = 0
    if "duplicated" in kind:
        noise = 1e-7 * G if "nearly" in kind else 0
        G = G[rng.integers(0, max(1, n // 2), n)] + noise
    if kind == "graded":
        G *= 10 ** rng.uniform(-6, 0, (n, 1))
    G *= 10.0 ** rng.choice([-6, 0, 6])
    if kind == "float32":
        G32 = G[:, : max(1, n // 3)].astype(np.float32)
        return np.asarray(G32 @ G32.T, dtype=np.float64)
    return np.asarray(G @ G.T)


def random_cap(rng: np.random.Generator, n: int) -> float:
    return float(rng.choice([1.0, 1 / n, min(1.0, 1.5 / n), rng.uniform(1 / n, 1)]))


def kkt_residual(Q: Array, alpha: Array, cap: float) -> float:
    """How far the best ν is from: g ≥ ν where α = 0, g ≤ ν where α = C, g = ν in between; g = Qα, Q scaled to 1.

    A ν exists when no weight that can shrink has a larger g than one that can grow. No tolerance on α: a weight of
    1e-15 can shrink.
    """
    g = Q @ alpha / (Q.diagonal().max() or 1.0)
    can_shrink, can_grow = g[alpha > 0], g[alpha < cap]
    return max(0.0, float(can_shrink.max() - can_grow.min())) if can_grow.size else 0.0


def assert_feasible(alpha: Array, n: int, cap: float) -> None:
    assert alpha.shape == (n,)
    assert alpha.dtype == np.float64
    assert alpha.min() >= 0
    assert alpha.max() <= max(cap, 1 / n)
    assert abs(alpha.sum() - 1) <= 1e-12


def test_kkt_conditions_on_500_problems() -> None:
    rng = np.random.default_rng(0)
    for i in range(500):
        n = int(rng.integers(1, 51))
        Q, cap = gram(rng, ZOO[i % len(ZOO)], n), random_cap(rng, n)
        alpha = capped_simplex(Q, cap)
        assert_feasible(alpha, n, cap)
        assert kkt_residual(Q, alpha, cap) <= 1e-8, f"problem {i}: {ZOO[i % len(ZOO)]}, N = {n}, cap = {cap}"


@pytest.mark.parametrize("kind", ZOO)
def test_kkt_conditions_at_200_clients(kind: str) -> None:
    rng = np.random.default_rng(1)
    Q = gram(rng, kind, 200)
    for cap in (1.0, 1.5 / 200):
        alpha = capped_simplex(Q, cap)
        assert_feasible(alpha, 200, cap)
        assert kkt_residual(Q, alpha, cap) <= 1e-8


def test_kkt_conditions_at_1000_clients() -> None:
    rng = np.random.default_rng(2)
    Q = gram(rng, "low rank", 1000)
    alpha = capped_simplex(Q, 0.01)
    assert_feasible(alpha, 1000, 0.01)
    assert kkt_residual(Q, alpha, 0.01) <= 1e-8


def test_the_residual_sees_a_perturbed_answer() -> None:
    rng = np.random.default_rng(3)
    G = rng.standard_normal((12, 20))
    Q, cap = G @ G.T, 0.15
    alpha = capped_simplex(Q, cap)
    at_zero, at_cap = int(alpha.argmin()), int(alpha.argmax())
    inside = np.flatnonzero((alpha > 0) & (alpha < cap))
    assert alpha[at_zero] == 0
    assert alpha[at_cap] == cap
    for giver, taker in [(inside[0], inside[1]), (inside[0], at_zero), (at_cap, inside[0])]:
        moved = alpha.copy()
        moved[giver] -= 1e-6
        moved[taker] += 1e-6
        assert kkt_residual(Q, moved, cap) > 1e-8


@pytest.mark.parametrize("kind", ZOO)
def test_order_of_clients_does_not_matter(kind: str) -> None:
    rng = np.random.default_rng(4)
    for n in (2, 7, 30):
        Q, cap, order = gram(rng, kind, n), random_cap(rng, n), rng.permutation(n)
        alpha, shuffled = capped_simplex(Q, cap), capped_simplex(Q[np.ix_(order, order)], cap)
        # A singular Q may have many optimal weights; the direction Σ αᵢ gᵢ that they give is the same.
        step = np.zeros(n)
        step[order] = shuffled
        step -= alpha
        assert abs(step @ Q @ step) <= 1e-9 * Q.diagonal().max()
        if kind == "full":
            np.testing.assert_allclose(step, 0, atol=1e-8)


def test_scale_does_not_matter() -> None:
    rng = np.random.default_rng(5)
    G = rng.standard_normal((9, 5))
    alpha = capped_simplex(G @ G.T, 0.4)
    for scale in (1e-300, 1e-12, 1e12, 1e300):
        np.testing.assert_allclose(capped_simplex(scale * (G @ G.T), 0.4), alpha, atol=1e-8)


@pytest.mark.parametrize("kind", ZOO)
def test_identical_clients_count_alike(kind: str) -> None:
    rng = np.random.default_rng(6)
    for n in (2, 7, 30):
        with_copies = [*range(n), 0, 0]
        Q = gram(rng, kind, n)[np.ix_(with_copies, with_copies)]
        alpha = capped_simplex(Q, random_cap(rng, n + 2))
        np.testing.assert_allclose(alpha[[n, n + 1]], alpha[0], atol=1e-6)


def test_diagonal_q_weighs_clients_by_the_inverse() -> None:
    q = np.array([1.0, 2.0, 4.0, 0.5])
    np.testing.assert_allclose(capped_simplex(np.diag(q)), (1 / q) / (1 / q).sum(), atol=1e-9)


def test_two_clients_have_the_closed_form_of_mgda() -> None:
    rng = np.random.default_rng(7)
    for cap in (0.6, 1.0):
        for _ in range(50):
            a, b = rng.standard_normal((2, 3))
            first = np.clip((b - a) @ b / ((a - b) @ (a - b)), 1 - cap, cap)
            G = np.stack([a, b])
            np.testing.assert_allclose(capped_simplex(G @ G.T, cap), [first, 1 - first], atol=1e-8)


def test_a_client_without_a_gradient_takes_all_it_may() -> None:
    np.testing.assert_allclose(capped_simplex(np.diag([1.0, 0.0, 1.0]), 0.5), [0.25, 0.5, 0.25], atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 49, 1000])
def test_uniform_when_nothing_else_is_feasible_or_better(n: int) -> None:
    uniform = np.full(n, 1 / n)
    np.testing.assert_array_equal(capped_simplex(np.zeros((n, n))), uniform)
    np.testing.assert_array_equal(capped_simplex(np.diag(np.arange(1.0, n + 1)), 1 / n), uniform)
    np.testing.assert_allclose(capped_simplex(np.ones((n, n))), uniform, atol=1e-8)


@pytest.mark.parametrize("slack", [-5e-13, 5e-13])
def test_a_cap_of_one_over_n_may_be_rounded(slack: float) -> None:
    np.testing.assert_array_equal(capped_simplex(np.diag([1.0, 2.0, 9.0]), (1 + slack) / 3), np.full(3, 1 / 3))


def test_a_cap_above_one_is_no_cap_and_the_input_is_not_changed() -> None:
    Q = np.diag([1.0, 9.0])
    np.testing.assert_array_equal(capped_simplex(Q, np.inf), capped_simplex(Q))
    np.testing.assert_array_equal(Q, np.diag([1.0, 9.0]))
    np.testing.assert_array_equal(capped_simplex(np.array([[7.0]]), 3.0), [1.0])


@pytest.mark.parametrize(
    ("Q", "cap", "message"),
    [
        (np.zeros((2, 3)), 1.0, r"square matrix with at least one row, got shape \[2, 3\]"),
        (np.zeros(4), 1.0, r"square matrix with at least one row, got shape \[4\]"),
        (np.zeros((0, 0)), 1.0, r"square matrix with at least one row, got shape \[0, 0\]"),
        (np.array([[1.0, 0.5], [0.4, 1.0]]), 1.0, r"symmetric, got entries .* by up to 0\.1"),
        (np.array([[1.0, 0.5], [0.500005, 1.0]]), 1.0, r"symmetric, got entries .* by up to 5e-06"),
        (np.array([[1.0, np.nan], [np.nan, np.inf]]), 1.0, "finite, got 3 entries that are NaN or infinite"),
        (np.array([[1.0, 0.0], [0.0, -0.1]]), 1.0, "positive semidefinite"),
        (np.array([[0.0, 1.0], [1.0, 0.0]]), 1.0, "positive semidefinite"),
        (np.eye(4), 0.2, r"cap must be at least 1/N = 0\.25 for the 4 weights to sum to 1, got 0\.2"),
        (np.eye(4), np.nan, r"cap must be at least 1/N = 0\.25 .* got nan"),
    ],
)
def test_errors_say_what_was_expected(Q: Array, cap: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capped_simplex(Q, cap)


def test_a_solver_that_gives_up_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(qp._SETTINGS, "iter_limit", 1)
    with pytest.raises(RuntimeError, match=r"DAQP stopped with exit flag -\d after \d+ iterations \(N = 3\)"):
        capped_simplex(np.diag([1.0, 2.0, 3.0]), 0.5)
