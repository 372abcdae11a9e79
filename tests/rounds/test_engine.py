"""A run of many rounds: what it does with samples, failures, checkpoints and bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import InputError
from maecho.rounds import LOSSES, PEERS, DivergedError, History, Local, Merging, Relaying, RoundRecord, Rounds, engine
from support.clients import rng
from support.federations import Clients, clouds, network

RUN = Rounds(rounds=4, sampled=3, local=Local(epochs=2, learning_rate=0.05, batch_size=16))
Data = tuple[Tensor, Tensor]


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def facts(history: History) -> list[Any]:
    """All of the records but times."""
    return [(r.number, r.sampled, dict(r.left_out), r.accuracy, r.bytes, dict(r.norms)) for r in history.records]


def test_clients_are_drawn_from_the_seed_and_the_round() -> None:
    samples = [RUN.sample(k, 100) for k in range(1, 30)]
    assert all(len(set(one)) == 3 and set(one) <= set(range(100)) for one in samples)
    assert len({tuple(one) for one in samples}) > 25
    assert samples[4] == RUN.sample(5, 100) != replace(RUN, seed=1).sample(5, 100)
    assert len({i for one in samples for i in one}) > 50


def test_the_seed_decides_everything(clients: Clients, test_data: Data) -> None:
    state = torch.random.get_rng_state()
    model = network()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    one, again = (RUN(model, clients, test_data) for _ in range(2))
    other = replace(RUN, seed=1)(model, clients, test_data)
    assert equal(one.weights, again.weights)
    assert facts(one) == facts(again)
    assert not equal(one.weights, other.weights)
    assert equal(before, model.state_dict()), "the model is left as it was"
    assert torch.equal(state, torch.random.get_rng_state())


def test_side_by_side_changes_rounding_alone(clients: Clients, test_data: Data) -> None:
    clients = [(x.double(), y) for x, y in clients]
    test_data = (test_data[0].double(), test_data[1])
    together, alone = (
        replace(RUN, side_by_side=side)(network().double(), clients, test_data) for side in (True, False)
    )
    for name, tensor in together.weights.items():
        torch.testing.assert_close(tensor, alone.weights[name], rtol=1e-8, atol=1e-10)


def test_training_is_worth_it(clients: Clients, test_data: Data) -> None:
    local = Local(epochs=1, learning_rate=0.02, batch_size=16)
    history = replace(RUN, rounds=12, sampled=6, local=local)(network(), clients, test_data)
    assert history.accuracies[-1] > 0.9 > history.accuracies[0]
    assert [r.number for r in history.records] == list(range(1, 13))
    assert history.records[0].bytes == sum(t.nbytes for t in history.weights.values())
    assert history.records[0].norms.keys() == {"0.weight", "2.weight"}
    assert history.records[-1].norms["0.weight"] == pytest.approx(float(history.weights["0.weight"].norm()), rel=1e-6)


SERVERS: dict[str, Any] = {
    **PEERS,
    "ma-echo": Merging("ma-echo"),
    "regmean kept": Merging("regmean", kept=0.7),
    "echo-chain": Merging("echo-chain"),
    "relay kept": Relaying(kept=0.7),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_stopped_run_goes_on_bit_for_bit(name: str, clients: Clients, test_data: Data, tmp_path: Path) -> None:
    """It is stopped after each of its rounds, the server's state included."""
    run = replace(RUN, server=SERVERS[name], local=replace(RUN.local, loss=LOSSES["own-classes"], clip=1.0))  # type: ignore[type-var]
    whole = run(network(), clients, test_data)
    path = tmp_path / "run.safetensors"
    for last in range(1, 5):
        history = replace(run, rounds=last)(network(), clients, test_data, checkpoint=path)
        assert len(history.records) == last
    assert equal(history.weights, whole.weights)
    assert facts(history) == facts(whole)
    again = run(network(), clients, test_data, checkpoint=path, on_round=lambda record: pytest.fail("nothing is left"))
    assert equal(again.weights, whole.weights)


def test_a_checkpoint_of_more_rounds_is_refused(clients: Clients, test_data: Data, tmp_path: Path) -> None:
    """Its weights are those of a later round."""
    path = tmp_path / "run.safetensors"
    RUN(network(), clients, test_data, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="at most the 3 rounds that are asked for, got one of 4"):
        replace(RUN, rounds=3)(network(), clients, test_data, checkpoint=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", ["seed", "local", "server", "network", "data", "test"])
def test_a_checkpoint_of_another_run_is_refused(change: str, clients: Clients, test_data: Data, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    run = replace(RUN, rounds=1)
    run(network(), clients, test_data, checkpoint=path)
    before = path.read_bytes()
    changes: dict[str, Any] = {"seed": 1, "local": Local(epochs=1), "server": PEERS["fedprox"]}
    other = replace(run, **{change: changes[change]}) if change in changes else run
    model = network(1) if change == "network" else network()
    if change == "data":
        x, y = clients[2]
        clients[2] = (x + 1e-6, y)
    if change == "test":
        test_data = (test_data[0], test_data[1].flip(0))
    with pytest.raises(InputError, match="must be a checkpoint of these settings, this network and these clients"):
        other(model, clients, test_data, checkpoint=path)
    assert path.read_bytes() == before


def test_a_damaged_checkpoint_is_refused(clients: Clients, test_data: Data, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    RUN(network(), clients, test_data, checkpoint=path)
    whole = path.read_bytes()
    for bad in (b"", whole[:100], whole[:-7], b"{}" * 50):
        path.write_bytes(bad)
        with pytest.raises(InputError, match=re.escape(str(path))):
            RUN(network(), clients, test_data, checkpoint=path)
        assert path.read_bytes() == bad


class Fussy(nn.Sequential):
    """Fails on a client of one example, as a network with statistics of batches would."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.dim() == 2 and len(x) == 1:
            raise ValueError("one example is\nnot enough")
        found: Tensor = super().forward(x)
        return found


@pytest.mark.parametrize("side", [True, False])
def test_a_client_that_fails_is_left_out_and_named(side: bool, clients: Clients, test_data: Data) -> None:
    clients[0] = (clients[0][0] * torch.nan, clients[0][1])
    clients[1] = (clients[1][0][:, :5], clients[1][1])
    clients[2] = (clients[2][0][:1], clients[2][1][:1])
    clients[3] = (clients[3][0], clients[3][1] + 90)
    run = replace(RUN, rounds=1, sampled=6, side_by_side=side)
    (record,) = run(Fussy(*network()), clients, test_data).records
    assert record.sampled == tuple(range(6))
    assert record.left_out.keys() == {0, 1, 2, 3}
    assert record.left_out[0] == "NaN or infinity in '0.weight' after training"
    assert "mat1 and mat2" in record.left_out[1]
    assert record.left_out[2] == "one example is not enough"
    with pytest.raises(InputError, match=r"round 1: at least one client must return a model, got none \(client 0: NaN"):
        replace(run, sampled=4)(Fussy(*network()), clients[:4], test_data)


def test_a_run_that_diverges_says_so_and_keeps_what_was_before(
    clients: Clients, test_data: Data, tmp_path: Path
) -> None:
    """From the third round on weights overflow. The checkpoint is of the round before."""

    class Explosive(type(PEERS["fedavg"])):  # type: ignore[misc]
        def __call__(self, round_: Any, state: Any) -> Any:
            outcome = super().__call__(round_, state)
            grown = {name: 1e30 * t for name, t in outcome.weights.items()}
            return outcome if round_.number < 3 else replace(outcome, weights=grown)

    path = tmp_path / "run.safetensors"
    run = replace(RUN, server=Explosive())
    with pytest.raises(DivergedError, match=r"round 3: the merged model must give finite outputs") as caught:
        run(network(), clients, test_data, checkpoint=path)
    assert [record.number for record in caught.value.history.records] == [1, 2]
    again = replace(run, rounds=2)(network(), clients, test_data, checkpoint=path)
    assert equal(again.weights, caught.value.history.weights)


def test_every_round_is_told(clients: Clients, test_data: Data) -> None:
    told: list[RoundRecord] = []
    history = RUN(network(), clients, test_data, on_round=told.append)
    assert tuple(told) == history.records


def test_clients_are_trained_side_by_side_where_that_can_be(
    clients: Clients, test_data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(*given: Any) -> Any:
        raise AssertionError("one by one")

    monkeypatch.setattr(engine, "train_one", alone)
    RUN(network(), clients, test_data)
    with pytest.raises(DivergedError, match="one by one"):
        replace(RUN, side_by_side=False)(network(), clients, test_data)
    with pytest.raises(DivergedError, match="one by one"):
        RUN(nn.Sequential(nn.Dropout(0.1), *network()), clients, test_data)


def test_a_network_whose_outputs_are_no_scores_says_so(clients: Clients, test_data: Data) -> None:
    class Pair(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    for side in (True, False):
        with pytest.raises(DivergedError, match=r"got none \(client \d: .*tuple"):
            replace(RUN, side_by_side=side)(Pair(*network()), clients, test_data)


def test_a_round_counts_those_that_are_left(clients: Clients, test_data: Data) -> None:
    """What a broken client does to a round is what its absence does."""
    local = Local(epochs=1, learning_rate=0.05)
    broken = [*clients[:3], (clients[3][0] * torch.nan, clients[3][1])]
    run = Rounds(rounds=1, sampled=4, local=local)
    with_it = run(network(), broken, test_data)
    without = replace(run, sampled=3)(network(), clients[:3], test_data)
    for name, tensor in with_it.weights.items():
        torch.testing.assert_close(tensor, without.weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampled": 7}, "sampled must be at most the number of clients, 6, got 7"),
        ({"sampled": 0}, "sampled must be a whole number, at least 1, got 0"),
        ({"rounds": 0}, "rounds must be a whole number, at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number, at least 0, got -1"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str, clients: Clients, test_data: Data) -> None:
    with pytest.raises(InputError, match=message):
        replace(RUN, **options)(network(), clients, test_data)


@pytest.mark.filterwarnings("ignore:.*not sent. .*since the inputs are not one tensor")
def test_a_server_that_needs_what_clients_cannot_send_is_named() -> None:
    """Tokens have no mean, so nothing can be drawn."""
    model = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 4))
    tokens = [(torch.randint(0, 7, (9, 3), generator=rng(i)), torch.arange(9) % 4) for i in range(3)]
    with pytest.raises(InputError, match=r"round 1: .*moments"):
        replace(RUN, server=Merging("echo-chain"))(model, tokens, tokens[0])


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ((torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64)), "client 4 must have at least one example, got none"),
        ((torch.zeros(3, 12), torch.zeros(2, dtype=torch.int64)), r"client 4 must have inputs .* each, got \(3, 12\)"),
        ((torch.zeros(3, 12), torch.zeros(3)), r"int64 label for each, got .*float32$"),
        ((torch.zeros(3, 12), [1, 2, 3]), "got .* and list"),
        ((torch.zeros(3, 12), torch.tensor([0, -1, 2])), "client 4 must have labels from 0 on, got -1"),
    ],
)  # fmt: skip
def test_bad_clients(client: Any, message: str, clients: Clients, test_data: Data) -> None:
    clients[4] = client
    with pytest.raises(InputError, match=message):
        RUN(network(), clients, test_data)
    with pytest.raises(InputError, match=message.replace("client 4", "the test")):
        RUN(network(), clouds_of(3), client)


def clouds_of(count: int) -> Clients:
    return [clouds(10, (0, 1), i) for i in range(count)]


def test_a_merge_that_is_not_finite_ends_the_run(clients: Clients, test_data: Data) -> None:
    class Broken(type(PEERS["fedavg"])):  # type: ignore[misc]
        def __call__(self, round_: Any, state: Any) -> Any:
            outcome = super().__call__(round_, state)
            return replace(outcome, weights={**outcome.weights, "0.bias": outcome.weights["0.bias"] * torch.inf})

    with pytest.raises(InputError, match=r"round 1: the merged model must be finite, got NaN or infinity in '0\.bias'"):
        replace(RUN, server=Broken())(network(), clients, test_data)


def record(number: int, accuracy: float, sent: int = 10) -> RoundRecord:
    return RoundRecord(number, (0,), {}, accuracy, sent, 1.0, 2.0, 3.0, {})


def test_history() -> None:
    history = History({}, tuple(record(k, a) for k, a in enumerate((0.1, 0.8, 0.7, 0.9), start=1)))
    assert history.mean(2, 3) == pytest.approx(0.75)
    assert (history.rounds_to(0.8), history.rounds_to(0.85), history.rounds_to(0.95)) == (2, 4, None)
    assert (history.bytes_to(0.8), history.bytes_to(0.85), history.bytes_to(0.95)) == (20, 40, None)
    assert history.records[0].seconds == 6
