"""Every peer is FedAvg where it must be and not elsewhere; SCAFFOLD and FedNova find the optimum that FedAvg misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from maecho.rounds import PEERS, Local, Round, Rounds
from maecho.rounds.peers import Adaptive, Average, Dynamic, Momentum, Normalised, Proximal, Scaffold
from maecho.rounds.training.losses import Step

Make = Callable[..., Round]


def average(round_: Round) -> dict[str, Tensor]:
    """FedAvg written out."""
    total = sum(one.examples for one in round_.returned)
    return {
        name: torch.stack([one.examples / total * one.weights[name].double() for one in round_.returned]).sum(0)
        for name in round_.weights
    }


def gap(one: Any, other: Any) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_fedavg(make_round: Make) -> None:
    round_ = make_round()
    assert gap(Average()(round_, {}).weights, average(round_)) < 1e-7


@pytest.mark.parametrize(
    ("server", "sizes", "local"),
    [
        (Proximal(0.0), (30, 50), Local()),
        (Scaffold(), (40, 40), Local()),
        (Normalised(), (30, 50), Local(batch_size=64)),
        (Momentum(beta=0.0), (30, 50), Local()),
        (Adaptive(step=1e6, beta_1=0.0, beta_2=0.0, tau=1e6), (30, 50), Local()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_is_fedavg_in_its_case(make_round: Make, server: Any, sizes: tuple[int, ...], local: Local) -> None:
    round_ = make_round(sizes, local)
    assert gap(server(round_, {}).weights, average(round_)) < 1e-6
    assert server.correction(round_.weights, {}, 0).offset is None


@pytest.mark.parametrize(
    ("server", "sizes", "local"),
    [
        (Scaffold(step=0.5), (40, 40), Local()),
        (Scaffold(), (30, 50), Local()),
        (Normalised(), (30, 90), Local(batch_size=32)),
        (Momentum(step=0.5), (30, 50), Local()),
        (Dynamic(), (30, 50), Local()),
        (Adaptive(), (30, 50), Local()),
        (Adaptive("yogi"), (30, 50), Local()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_is_not_fedavg_elsewhere(make_round: Make, server: Any, sizes: tuple[int, ...], local: Local) -> None:
    round_ = make_round(sizes, local)
    assert gap(server(round_, {}).weights, average(round_)) > 1e-3


def test_where_nothing_moves_all_stay(make_round: Make) -> None:
    round_ = make_round()
    still = replace(round_, returned=[replace(one, weights=round_.weights) for one in round_.returned])
    for server in PEERS.values():
        assert gap(server(still, {}).weights, round_.weights) < 1e-7


def test_what_a_client_uploads(make_round: Make) -> None:
    round_ = make_round()
    size = sum(t.nbytes for t in round_.weights.values())
    for name, server in PEERS.items():
        assert server(round_, {}).bytes == (2 * size if name == "scaffold" else size), name


def test_fedprox_pulls() -> None:
    assert Proximal(0.3).correction({}, {}, 4).pull == 0.3
    assert PEERS["fedprox"] == Proximal(0.1)


def test_scaffold_over_two_rounds_is_its_formula(make_round: Make) -> None:
    server, local = Scaffold(), Local(epochs=2, momentum=0.0, batch_size=8)
    first = make_round((16, 24), local)
    state = server(first, {}).state
    steps = {0: 4, 1: 6}
    c_i = {
        one.client: {n: (first.weights[n] - one.weights[n]) / (0.01 * steps[one.client]) for n in first.trained}
        for one in first.returned
    }
    c = {n: sum(own[n] for own in c_i.values()) / 10 for n in first.trained}
    correction = server.correction(first.weights, state, 1)
    assert correction.offset is not None
    for n in first.trained:
        torch.testing.assert_close(correction.offset[n], c[n] - c_i[1][n])
        torch.testing.assert_close(server.correction(first.weights, state, 7).offset[n], c[n])  # type: ignore[index]
    second = make_round((16, 24), local, number=2)
    state = server(second, state).state
    for one in second.returned:
        for n in second.trained:
            new = c_i[one.client][n] - c[n] + (second.weights[n] - one.weights[n]) / (0.01 * steps[one.client])
            torch.testing.assert_close(state[f"{one.client} {n}"], new, rtol=1e-4, atol=1e-4)


def test_feddyn_over_two_rounds_is_its_formula(make_round: Make) -> None:
    server, first = Dynamic(alpha=0.5), make_round((16, 24))
    outcome = server(first, {})
    h_i = {o.client: {n: 0.5 * (first.weights[n] - o.weights[n]) for n in first.trained} for o in first.returned}
    h = {n: sum(own[n] for own in h_i.values()) / 10 for n in first.trained}
    mean = {n: (first.returned[0].weights[n] + first.returned[1].weights[n]) / 2 for n in first.trained}
    for n in first.trained:
        torch.testing.assert_close(outcome.weights[n], mean[n] - h[n] / 0.5)
        offset = server.correction(outcome.weights, outcome.state, 1).offset
        assert offset is not None
        torch.testing.assert_close(offset[n], -h_i[1][n])
    assert server.correction(outcome.weights, outcome.state, 5).offset is None
    assert server.correction(outcome.weights, outcome.state, 5).pull == 0.5


def test_momentum_and_adam_over_two_rounds(make_round: Make) -> None:
    rounds = [make_round(number=k) for k in (1, 2)]
    moves = [{n: r.weights[n] - average(r)[n] for n in r.trained} for r in rounds]
    momentum, adam, yogi = Momentum(beta=0.8, step=0.5), Adaptive(), Adaptive("yogi")
    state = momentum(rounds[0], {}).state
    after = momentum(rounds[1], state).weights
    for n in rounds[0].trained:
        expected = rounds[1].weights[n] - 0.5 * (0.8 * moves[0][n] + moves[1][n])
        torch.testing.assert_close(after[n].double(), expected, atol=1e-6, rtol=1e-5)
    for server, sign in ((adam, False), (yogi, True)):
        after = server(rounds[1], server(rounds[0], {}).state).weights
        for n in rounds[0].trained:
            m, v = torch.zeros_like(moves[0][n]), torch.full_like(moves[0][n], 1e-6)
            for move in moves:
                m = 0.9 * m + 0.1 * move[n]
                v = v - 0.01 * move[n] ** 2 * (v - move[n] ** 2).sign() if sign else 0.99 * v + 0.01 * move[n] ** 2
            expected = rounds[1].weights[n] - 0.01 * m / (v.sqrt() + 1e-3)
            torch.testing.assert_close(after[n].double(), expected, atol=1e-5, rtol=1e-4)


@dataclass(frozen=True)
class Quadratic:
    """½ k (w − centre)² of the first output. The label says which client it is."""

    curvatures: tuple[float, ...]
    centres: tuple[float, ...]
    needs_teacher: ClassVar[bool] = False

    def __call__(self, step: Step) -> Tensor:
        k, centre = (torch.tensor(values)[step.labels] for values in (self.curvatures, self.centres))
        return 0.5 * k * (step.logits[..., 0] - centre) ** 2


def end(server: Any, sizes: tuple[int, ...], loss: Quadratic, epochs: int, rate: float = 0.1) -> float:
    """The weight after many rounds in which all clients take part."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    clients = [(torch.ones(n, 1), torch.full((n,), i)) for i, n in enumerate(sizes)]
    local = Local(epochs=epochs, learning_rate=rate, momentum=0.0, batch_size=10, loss=loss)
    run = Rounds(rounds=60, sampled=len(sizes), server=server, local=local)
    return float(run(model, clients, (torch.ones(2, 1), torch.tensor([0, 1]))).weights["weight"][0, 0])


def test_scaffold_finds_the_optimum_that_fedavg_misses() -> None:
    """Clients of different curvature drift; the optimum is Σ k c / Σ k."""
    loss = Quadratic((1.0, 6.0), (0.0, 1.0))
    optimum = 6 / 7
    assert abs(end(Average(), (20, 20), loss, 10) - optimum) > 0.1
    assert end(Scaffold(), (20, 20), loss, 10) == pytest.approx(optimum, abs=1e-3)
    assert end(Dynamic(alpha=1.0), (20, 20), loss, 10) == pytest.approx(optimum, abs=1e-2)


def test_fednova_finds_the_optimum_that_fedavg_misses() -> None:
    """Clients of different numbers of steps; the optimum weights them by their examples."""
    loss = Quadratic((0.2, 0.2), (0.0, 1.0))
    optimum = 80 / 100
    assert abs(end(Average(), (20, 80), loss, 5, 0.01) - optimum) > 0.05
    assert end(Normalised(), (20, 80), loss, 5, 0.01) == pytest.approx(optimum, abs=0.02)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Proximal(-1), "mu must be at least 0 and finite, got -1"),
        (lambda: Scaffold(0), "step must be positive and finite, got 0"),
        (lambda: Dynamic(0), "alpha must be positive and finite, got 0"),
        (lambda: Momentum(1.0), "beta must be at least 0 and below 1, got 1.0"),
        (lambda: Adaptive("sgd"), "kind must be one of adam, yogi, got 'sgd'"),  # type: ignore[arg-type]
        (lambda: Adaptive(tau=0), "tau must be positive and finite, got 0"),
        (lambda: Adaptive(step=0), "step must be positive and finite, got 0"),
    ],
)
def test_bad_settings(make: Callable[[], object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make()
