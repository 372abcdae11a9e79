"""Methods and the relay as servers of a round, and sums of earlier rounds, against the closed forms written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import InputError, aggregate, make_upload, relay
from maecho.aggregation import RegMean
from maecho.aggregation.fisher import Fisher
from maecho.echo.fit import Regression
from maecho.rounds import Merging, Paced, Relaying, Round, Rounds
from maecho.rounds.choices import SERVERS, find_server
from maecho.rounds.peers import Adaptive, Proximal
from maecho.rounds.servers import Returned
from support.clients import rng
from support.federations import CLASSES, clouds

Make = Callable[..., Round]


def gap(one: Any, other: Any) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def uploads(round_: Round, *statistics: str) -> list[Any]:
    return [
        make_upload(
            round_.loaded(one.weights), [(one.x, one.y)], f"client {one.client}", statistics, rank=None, mean_of=64
        )
        for one in round_.returned
    ]


@pytest.mark.parametrize("method", ["regmean", "ma-echo", "fisher", "echo-chain"])
def test_a_round_is_the_method(make_round: Make, method: str) -> None:
    round_ = make_round((60, 50))
    outcome = Merging(method)(round_, {})
    own = uploads(round_, "gram", "projector", "classes", "moments", "features", "fisher")
    assert gap(outcome.weights, aggregate(own, method, model=round_.network)) < 1e-5
    assert outcome.bytes > sum(t.nbytes for t in round_.weights.values())
    assert not outcome.state


def linear(number: int, sizes: tuple[int, ...]) -> Round:
    """A round of a network of one layer, in which every client sees inputs in all directions."""
    model = nn.Linear(12, CLASSES).double()
    weights = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    returned = []
    for i, size in enumerate(sizes):
        draw = rng(10 * number + i)
        own = {name: torch.randn(t.shape, generator=draw, dtype=torch.float64) for name, t in weights.items()}
        x, y = clouds(size, (0, 1, 2, 3), 10 * number + i)
        returned.append(Returned(i + 10 * number, own, x.double(), y))
    return Round(number, weights, returned, None, 10, frozenset(weights), model)  # type: ignore[arg-type]


def solved(parts: list[tuple[float, Round]]) -> Tensor:
    """Σ f W_i G_i (Σ f G_i)⁻¹ over the clients of all rounds, with the factor of each round."""
    G, WG = torch.zeros(13, 13).double(), torch.zeros(CLASSES, 13).double()
    for factor, round_ in parts:
        for one in round_.returned:
            H = torch.cat([one.x, torch.ones(len(one.x), 1)], 1)
            W = torch.cat([one.weights["weight"], one.weights["bias"].unsqueeze(1)], 1)
            G += factor * H.T @ H
            WG += factor * W @ (H.T @ H)
    return WG @ torch.linalg.inv(G)


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_regmean_with_kept_sums_is_that_of_all_rounds(kept: float) -> None:
    server = Merging(RegMean(ridge=0.0), kept=kept)
    rounds = [linear(k, (40, 60)) for k in (1, 2, 3)]
    state: Any = {}
    weights = rounds[0].weights
    for k, round_ in enumerate(rounds):
        outcome = server(replace(round_, weights=weights), state)
        weights, state = outcome.weights, outcome.state
        expected = solved([(kept ** (k - j), rounds[j]) for j in range(k + 1) if kept or j == k])
        torch.testing.assert_close(weights["weight"].double(), expected[:, :-1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights["bias"].double(), expected[:, -1], rtol=1e-5, atol=1e-6)


def test_fisher_with_kept_sums_is_that_of_all_rounds() -> None:
    rounds = [linear(k, (40, 60)) for k in (1, 2)]
    server = Merging(Fisher(ridge=0.0), kept=0.5)
    first = server(rounds[0], {})
    second = server(replace(rounds[1], weights=first.weights), first.state)
    top, below = torch.zeros(CLASSES, 12).double(), torch.zeros(CLASSES, 12).double()
    for factor, round_ in zip((0.5, 1.0), rounds, strict=True):
        for upload in uploads(round_, "fisher"):
            F = upload.statistics["fisher"]["weight"].double()
            top, below = top + factor * F * upload.weights["weight"], below + factor * F
    torch.testing.assert_close(second.weights["weight"].double(), top / below, rtol=1e-3, atol=1e-4)


def frozen() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, CLASSES))


@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_frozen_network_every_client_counts_once_in_any_order(seed: int) -> None:
    """AFL over all clients in one hand, whatever the order in which they come, and however often."""
    clients = [clouds(25 + i, (i % CLASSES, (i + 1) % CLASSES), i) for i in range(6)]
    model, test = frozen(), clouds(200, (0, 1, 2, 3), 50)
    everything = aggregate(
        [make_upload(model, [c], f"{i}", ["gram", "targets"], rank=None) for i, c in enumerate(clients)], "afl",
    )  # fmt: skip
    history = Rounds(rounds=12, sampled=2, server=Merging("afl", once=True), local=None, seed=seed)(
        model, clients, test
    )
    came = {client for record in history.records for client in record.sampled}
    assert came == set(range(6)), "a seed with which all come"
    assert sum(len(record.sampled) for record in history.records) > 6, "and some again"
    torch.testing.assert_close(history.weights["2.weight"], everything["2.weight"], rtol=1e-3, atol=1e-4)
    assert torch.equal(history.weights["0.weight"], model[0].weight)


def test_once_may_be_said_with_kept_in_full() -> None:
    assert Merging("afl", once=True, kept=1.0).kept == 1.0


def test_a_round_in_which_all_have_been_counted_changes_nothing() -> None:
    clients = [clouds(25, (0, 1, 2, 3), i) for i in range(2)]
    model = frozen()
    history = Rounds(rounds=3, sampled=2, server=Merging("afl", once=True), local=None)(model, clients, clients[0])
    assert [record.bytes > 0 for record in history.records] == [True, False, False]
    assert len(set(history.accuracies)) == 1


def test_the_relay_is_the_relay(make_round: Make) -> None:
    round_ = make_round((60, 50))
    expected = relay(round_.network, [(round_.loaded(one.weights), one.batches()) for one in round_.returned])
    outcome = Relaying()(round_, {})
    assert gap(outcome.weights, expected) < 1e-6
    assert not outcome.state
    plain = Relaying(Regression(head="regression"))(round_, {}).weights
    assert gap(plain, outcome.weights) > 1e-3


def test_the_relay_keeps_sums_of_its_stages(make_round: Make) -> None:
    """A round that says the same again changes nothing; one that says other things counts beside what was kept. It has
    no ridge, since that goes down with the number of examples."""
    server = Relaying(Regression(ridge=0.0), kept=0.5)
    round_, other = make_round((60, 50)), make_round((60, 50), number=2)
    first = server(round_, {})
    assert gap(server(round_, first.state).weights, first.weights) < 1e-5
    mixed, alone = server(other, first.state).weights, server(other, {}).weights
    assert gap(mixed, alone) > 1e-2
    little = {name: 1e-9 * t if t.is_floating_point() else t for name, t in first.state.items()}
    assert gap(server(other, little).weights, alone) < 1e-4, "what hardly counts changes nothing"


def test_servers_by_name() -> None:
    assert find_server("fedprox", {"mu": 0.3}) == Proximal(0.3)
    assert find_server("fedyogi", {"tau": 0.1}) == Adaptive("yogi", tau=0.1)
    assert find_server("echo-relay", {"pace": 0.5, "ridge": 0.01}) == Paced(Relaying(Regression(ridge=0.01), 0.9), 0.5)
    assert find_server("echo-relay") == Paced(Relaying(kept=0.9), 0.3)
    assert find_server("echo-relay", {"kept": 0.5, "pace": 1}) == Relaying(kept=0.5)
    assert find_server("regmean", {"kept": 0.7}) == Merging("regmean", kept=0.7)
    assert find_server("regmean", {"ridge": 0.1, "kept": 0.7}) == Merging(RegMean(ridge=0.1), kept=0.7)
    assert find_server("afl", {"once": True}) == Merging("afl", once=True)
    for name in SERVERS:
        assert callable(find_server(name))


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("average", {}, "server must be one of fedavg, fedprox, .* got 'average'"),
        ("scaffold", {"mu": 1}, "scaffold has the options step, pace, got 'mu'"),
        ("echo-relay", {"mu": 1}, "echo-relay has the options ridge, .*kept, pace, got 'mu'"),
        ("echo-relay", {"kept": 1.0}, "kept must be at least 0 and below 1, got 1.0"),
        ("regmean", {"rigde": 1}, "regmean has the options ridge, shrink, got 'rigde'"),
        ("regmean", {"kept": 2}, "kept must be from 0 to 1, got 2"),
        ("ma-echo", {"kept": 0.5}, "kept sums need a method that reads sums alone, got ma-echo, which reads projector"),
        ("ot", {"kept": 0.5}, "kept sums need a method that reads sums alone, got ot, which reads weights"),
        ("afl", {"once": True, "kept": 0.5}, "with once every sum counts in full, got kept = 0.5"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        find_server(name, options)
