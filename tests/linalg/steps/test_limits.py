"""The closed forms of MA-Echo's limits: where long iterations end, and exact cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum, projector
from maecho.linalg.steps.iteration import Coefficients, iterates
from maecho.linalg.steps.limits import Limit, largest_step
from maecho.linalg.symmetric import Diagonal
from support.clients import rng

FORMS = {
    "released": Coefficients(0.9, 0.9, 0.9),
    "printed": Coefficients(0.8, 1.0, 0.4),
    "all different": Coefficients(0.5, 0.9, 0.3),
    "anchored": Coefficients(0.6, 1.0, 0.75, anchored=True),
}


def problem(kind: str) -> tuple[list[Tensor], list[Spectrum | Diagonal], Tensor]:
    """Three clients of a grouped layer, their projectors, and a start that is none of them."""
    draw = rng(2)
    W = [torch.randn(2, 3, 6, generator=draw, dtype=torch.float64) for _ in range(4)]
    P: list[Spectrum | Diagonal] = []
    for rank in (2, 4, 6):
        s = 0.3 + 0.6 * torch.rand(2, 6, generator=draw, dtype=torch.float64)
        U = torch.linalg.qr(torch.randn(2, 6, 6, generator=draw, dtype=torch.float64))[0]
        P.append(Diagonal(s) if kind == "diagonal" else Spectrum(s[:, :rank], U[..., :rank]))
    return W[:3], P, W[3]


def limit(form: Coefficients, W: list[Tensor], P: list[Spectrum | Diagonal], start: Tensor) -> Tensor:
    one = Limit(form)
    for w, p in zip(W, P, strict=True):
        one.add(w, p)
    return one.matrix(start)


@pytest.mark.parametrize("kind", ["spectrum", "diagonal"])
@pytest.mark.parametrize("name", FORMS)
def test_long_iterations_end_there(name: str, kind: str) -> None:
    W, P, start = problem(kind)
    one = iterates(start, W, P, FORMS[name])
    for _ in range(3000):
        one.step()
    torch.testing.assert_close(one.merged(), limit(FORMS[name], W, P, start), rtol=1e-6, atol=1e-8)


def test_the_released_limit_is_regmean_with_a_prior_at_the_start() -> None:
    """With P_i = G_i (G_i + zI)⁻¹ it solves  min Σ tr (W − W_i) G_i (W − W_i)ᵀ / (N z)  with a term at W⁰."""
    W, _, start = problem("spectrum")
    draw, z, rate = rng(4), 0.7, 0.9
    X = [torch.randn(2, 9, 6, generator=draw, dtype=torch.float64) for _ in W]
    G = [x.mT @ x for x in X]
    P = [projector(Spectrum.of_dense(g), z) for g in G]
    mean = sum(p.dense() for p in P) / 3
    prior = torch.eye(6, dtype=torch.float64) - rate * mean
    right = start @ prior + sum(w @ g for w, g in zip(W, G, strict=True)) / (3 * z)
    expected = right @ torch.linalg.inv(prior + sum(G) / (3 * z))
    torch.testing.assert_close(limit(Coefficients(rate, rate, rate), W, P, start), expected)


def test_an_exact_projector_forces_its_clients_layer() -> None:
    """At the eigenvalue 1, K is set to 1 / 1e-9. The limit follows from that to the last digits."""
    ones, half = Diagonal(torch.ones(1, 1, dtype=torch.float64)), Diagonal(torch.full((1, 1), 0.5).double())
    W = [torch.full((1, 1, 1), w, dtype=torch.float64) for w in (2.0, 5.0)]
    rate, start = 0.5, torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    found = float(limit(Coefficients(rate, rate, rate), W, [ones, half], start))
    K = [1 / (1e-9 * rate), 0.5 / (rate * 0.5)]
    prior = 1 - rate * 0.75
    expected = (3 * prior + rate / 2 * (2 * K[0] + 5 * K[1])) / (prior + rate / 2 * sum(K))
    assert found == pytest.approx(2, abs=1e-7)
    assert found - 2 == pytest.approx(expected - 2, rel=1e-4)
    assert found != 2


@pytest.mark.parametrize("name", FORMS)
def test_where_nobody_has_data_the_start_stays(name: str) -> None:
    W, P, start = problem("spectrum")
    thin = P[0]
    assert isinstance(thin, Spectrum)
    held = thin.basis @ thin.basis.mT
    exact = thin.map(torch.ones_like)
    found = limit(FORMS[name], W[:1], [exact], start)
    torch.testing.assert_close(found - found @ held, start - start @ held, rtol=1e-6, atol=1e-6)
    if FORMS[name].follow == FORMS[name].hold or FORMS[name].anchored:
        torch.testing.assert_close(found @ held, W[0] @ held, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_clients_that_agree_with_the_start_change_nothing(name: str) -> None:
    W, P, _ = problem("spectrum")
    torch.testing.assert_close(limit(FORMS[name], [W[0]] * 3, P, W[0]), W[0])


@pytest.mark.parametrize("name", FORMS)
def test_without_any_data_the_start_stays(name: str) -> None:
    W, _, start = problem("spectrum")
    torch.testing.assert_close(limit(FORMS[name], W, [Spectrum.zero(2, 6)] * 3, start), start)


def test_the_sums_are_in_float64() -> None:
    W, P, start = problem("spectrum")
    low = [p.to(dtype=torch.float32) for p in P]
    found = limit(FORMS["released"], [w.float() for w in W], low, start)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, limit(FORMS["released"], W, P, start), rtol=1e-5, atol=1e-5)


def coefficients(form: str, step: float, mu: float) -> Coefficients:
    """Of the three forms of MA-Echo."""
    hold = mu / (1 + mu)
    return (
        Coefficients(step, step, step) if form == "released" else Coefficients(2 * step, 1.0, hold, form == "anchored")
    )


@pytest.mark.parametrize("mu", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("form", ["released", "printed", "anchored"])
def test_below_the_largest_step_iterations_end_and_above_they_diverge(form: str, mu: float) -> None:
    """All clients share a direction with the eigenvalue 1, as they share the constant input of a bias."""
    W, _, start = problem("spectrum")
    draw, bound = rng(5), largest_step(form, mu)
    P: list[Spectrum | Diagonal] = []
    for _ in W:
        s = torch.cat([torch.ones(2, 1), 0.9 * torch.rand(2, 3, generator=draw)], 1).double()
        inner = torch.linalg.qr(torch.randn(2, 5, 5, generator=draw, dtype=torch.float64))[0]
        U = torch.eye(6, dtype=torch.float64).repeat(2, 1, 1)
        U[:, 1:, 1:] = inner
        P.append(Spectrum(s, U[..., :4]))
    below, above = (coefficients(form, share * bound, mu) for share in (0.97, 1.03))
    for projectors in (P, problem("spectrum")[1]):
        torch.testing.assert_close(after(2000, start, W, projectors, below), limit(below, W, projectors, start))
    assert not float(after(2000, start, W, P, above).abs().max()) < 1e6


def after(steps: int, start: Tensor, W: list[Tensor], P: list[Spectrum | Diagonal], form: Coefficients) -> Tensor:
    one = iterates(start, W, P, form)
    for _ in range(steps):
        one.step()
    return one.merged()
