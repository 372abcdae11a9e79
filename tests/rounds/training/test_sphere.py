"""A last layer that is fixed while clients train, and solved for after every round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho import InputError
from maecho.lab.demo_rounds import digits
from maecho.rounds import LOSSES, Local, Merging, Relaying, Rounds, Sphere
from maecho.rounds.peers import PEERS
from maecho.rounds.training.local import Correction
from maecho.rounds.training.one_by_one import train_one
from maecho.rounds.training.side_by_side import train_together
from maecho.rounds.training.sphere import FixedHead
from maecho.rounds.training.stack import Work
from support.clients import rng
from support.federations import CLASSES, Clients, clouds, network

LOCAL = Local(epochs=5, learning_rate=0.1, batch_size=16, loss=LOSSES["squared-error"], sphere=Sphere())
RUN = Rounds(rounds=4, sampled=3, local=LOCAL)


@pytest.fixture
def head() -> FixedHead:
    return FixedHead(Sphere(ridge=0.01, kept=0.5), network(), clouds(2, (0,), 0)[0])


def features(model: nn.Module, x: Tensor) -> Tensor:
    """Of `network`, on the sphere."""
    return functional.normalize(model[1](model[0](x)).double(), dim=-1)  # type: ignore[index,operator]


def test_the_head_is_orthonormal_and_reads_directions(head: FixedHead) -> None:
    start = head.start(network().state_dict())
    W = start["2.weight"].double()
    torch.testing.assert_close(W @ W.T, torch.eye(CLASSES, dtype=torch.float64), atol=1e-6, rtol=0)
    assert not start["2.bias"].any()
    assert torch.equal(start["0.weight"], network().state_dict()["0.weight"])
    head.network.load_state_dict(start)
    x, _ = clouds(9, (0, 1), 3)
    torch.testing.assert_close(head.network(x).double(), features(network(), x) @ W.T, atol=1e-6, rtol=1e-5)
    assert [n for n, p in head.network.named_parameters() if p.requires_grad] == ["0.weight", "0.bias"]


def test_clients_leave_it_as_it_is(head: FixedHead) -> None:
    start = head.start(network().state_dict())
    works = [Work(*clouds(20 + i, (0, 1), i), Correction(), i) for i in range(3)]
    together = train_together(head.network, start, works, LOCAL)
    for work, one in zip(works, together, strict=True):
        alone = train_one(head.network, start, work.x, work.y, LOCAL, work.correction, work.seed)
        for name, tensor in alone.items():
            torch.testing.assert_close(one[name], tensor, atol=1e-5, rtol=1e-4)
        assert torch.equal(one["2.weight"], start["2.weight"])
        assert not torch.equal(one["0.weight"], start["0.weight"])


def test_the_solution_is_that_of_all_examples_in_one_place(head: FixedHead) -> None:
    """By least squares on stacked examples, with rows √γ I below. Sums of the round before count half."""
    model, parts = network(), [clouds(25, (0, 1), 0), clouds(35, (2, 3, 0), 1)]
    weights, kept, sent = head.calibrate(model, parts, {})
    h, y = torch.cat([features(model, x) for x, _ in parts]), torch.cat([y for _, y in parts])

    def solved(rows: Tensor, wanted: Tensor) -> Tensor:
        ridge = 0.01 * float(rows.square().sum()) / rows.shape[1]
        below = ridge**0.5 * torch.eye(rows.shape[1], dtype=torch.float64)
        right = torch.cat([wanted, torch.zeros(len(below), CLASSES, dtype=torch.float64)])
        return torch.linalg.lstsq(torch.cat([rows, below]), right).solution.T

    h, wanted = h.detach(), torch.eye(CLASSES, dtype=torch.float64)[y]
    torch.testing.assert_close(weights["2.weight"].double(), solved(h, wanted), atol=1e-5, rtol=1e-4)
    assert not weights["2.bias"].any()
    assert sent == 4 * (8 * 9 // 2 + CLASSES * 8)
    x, more = clouds(30, (1, 3), 2)
    later, _, _ = head.calibrate(model, [(x, more)], kept)
    half = (
        torch.cat([features(model, x).detach(), 0.5**0.5 * h]),
        torch.cat([torch.eye(4).double()[more], 0.5**0.5 * wanted]),
    )
    torch.testing.assert_close(later["2.weight"].double(), solved(*half), atol=1e-5, rtol=1e-4)


def test_without_a_ridge_it_is_least_squares_of_the_smallest_norm() -> None:
    head = FixedHead(Sphere(ridge=0.0), network(), clouds(2, (0,), 0)[0])
    x, y = clouds(5, (0, 1), 0)
    weights, _, _ = head.calibrate(network(), [(x, y)], {})
    h = features(network(), x)
    expected = (torch.linalg.pinv(h) @ torch.eye(CLASSES).double()[y]).T
    torch.testing.assert_close(weights["2.weight"].double(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("server", [*PEERS.values(), Merging("ma-echo"), Merging("regmean", kept=0.5), Relaying()])
def test_it_goes_with_every_server(server: Any, clients: Clients, test_data: Any, tmp_path: Any) -> None:
    """And a stopped run goes on bit for bit, with the kept sums."""
    run = replace(RUN, server=server)
    whole = run(network(), clients, test_data)
    path = tmp_path / "run.safetensors"
    for last in (2, 4):
        history = replace(run, rounds=last)(network(), clients, test_data, checkpoint=path)
    assert all(torch.equal(history.weights[name], t) for name, t in whole.weights.items())
    assert whole.accuracies[-1] > 0.5
    assert not whole.weights["2.bias"].any()
    usual = replace(run, local=replace(LOCAL, sphere=None, loss=LOSSES["cross-entropy"]), rounds=1)
    more = whole.records[0].bytes - usual(network(), clients, test_data).records[0].bytes
    assert server not in PEERS.values() or more == 4 * (8 * 9 // 2 + CLASSES * 8)


def test_features_of_one_round_are_those_of_the_next(clients: Clients, test_data: Any) -> None:
    """The solved head is for evaluation: clients start from the fixed one again."""
    starts: list[Tensor] = []

    class Spy(Merging):
        def __call__(self, round_: Any, state: Any) -> Any:
            starts.append(round_.weights["2.weight"])
            return super().__call__(round_, state)

    history = replace(RUN, server=Spy("fedavg"), rounds=3)(network(), clients, test_data)
    assert all(torch.equal(one, starts[0]) for one in starts)
    assert not torch.equal(history.weights["2.weight"], starts[0])
    assert "2.weight" not in history.records[0].norms


def test_it_helps_under_label_skew() -> None:
    """scikit-learn's digits, one class a client."""
    model, clients, measured = digits(40, 1, 0)
    run = Rounds(rounds=8, sampled=5, local=replace(LOCAL, loss=LOSSES["cross-entropy"]))
    plain, fixed = (
        replace(run, local=replace(run.local, sphere=sphere))(model, clients, measured) for sphere in (None, Sphere())
    )
    assert fixed.mean(5, 8) > plain.mean(5, 8) + 0.2


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(12, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (Narrow(), "a fixed head needs at least as many inputs as classes, got 3 and 4 in 'out'"),
        (nn.Sequential(nn.Linear(12, 4), nn.ReLU()), "a network whose last layer is an nn.Linear, got another"),
        (nn.Sequential(nn.ReLU()), "a network whose last layer is an nn.Linear, got another"),
    ],
)
def test_networks_without_such_a_head(model: nn.Module, part: str, clients: Clients, test_data: Any) -> None:
    with pytest.raises(InputError, match=part):
        RUN(model, clients, test_data)


def test_a_head_inside_a_module(clients: Clients) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(12, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 4, bias=False)))
    head = FixedHead(Sphere(), model, torch.randn(2, 12, generator=rng(0)))
    assert head.network.state_dict().keys() == model.state_dict().keys()
    assert head.start(model.state_dict()).keys() == model.state_dict().keys()
    assert head.network(clients[0][0]).abs().max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("options", "part"),
    [({"ridge": -1}, "ridge must be at least 0"), ({"kept": 1.2}, "kept must be from 0 to 1, got 1.2")],
)
def test_bad_settings(options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        Sphere(**options)
