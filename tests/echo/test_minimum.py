"""A relay client with a minimum: what a single record carries does not leave it, whatever weights the server sends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho import Privacy, RelayClient
from maecho.echo.messages import Answer, Question
from maecho.echo.totals import UnitTotals
from maecho.echo.wire import whole_matrix
from support.clients import batches, network, rng
from support.federations import CLASSES, clouds
from support.relays import images, random_network, resnet, sequences, tied, transformer, twins
from support.tiny import refused_input

FAR = 1e3


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What is withheld is warned of; one test reads the words."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* are not in the answer, since fewer than")
        yield


def victim() -> tuple[nn.Sequential, Tensor, Tensor, int]:
    """A client, its data, and the record that the server is after: the one with the largest first entry."""
    x, y = clouds(200, (0, 1, 2, 3), seed=5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 14), nn.ReLU(), nn.Linear(14, CLASSES))
    return model, x, y, int(x[:, 0].argmax())


def trap(x: Tensor, model: nn.Sequential) -> dict[str, Tensor]:
    """First layers of a malicious server. Neuron 0 fires for one record alone; neurons 1 to 12 carry the inputs."""
    top = x[:, 0].sort().values
    W, b = torch.zeros(14, 12), torch.zeros(14)
    W[0, 0], b[0] = FAR, -FAR * float(top[-2])
    W[1:13], b[1:13] = torch.eye(12), FAR
    return {"0.weight": W, "0.bias": b}


def asked(client: RelayClient, weights: dict[str, Tensor]) -> UnitTotals:
    client.answer(Question(opening=True))
    answer = client.answer(Question(1, units={"2": None}, head="2", weights=weights))
    (totals,) = answer.totals
    return totals


def read_off(totals: UnitTotals, size: int = 15) -> Tensor:
    """The record that neuron 0 fires for: its row of Σ h hᵀ, divided by its own sum."""
    gram = whole_matrix(totals.gram, size)[0]
    return gram[0, 1:13] / gram[0, -1] - FAR


def test_an_attack_reads_a_record_off_an_answer() -> None:
    model, x, y, record = victim()
    client = RelayClient(model, [(x, y)], "ann")
    totals = asked(client, trap(x, model))
    torch.testing.assert_close(read_off(totals), x[record].double(), rtol=1e-3, atol=1e-3)
    assert client.withheld == {}
    outputs = model(x)[record].detach().double()
    W = totals.cross[0][:, 0] / whole_matrix(totals.gram, 15)[0][0, -1]
    torch.testing.assert_close(W, outputs, rtol=1e-3, atol=1e-3)


def test_with_a_minimum_the_attack_finds_nothing() -> None:
    model, x, y, _ = victim()
    client = RelayClient(model, [(x, y)], "ann", minimum=5)
    totals = asked(client, trap(x, model))
    gram = whole_matrix(totals.gram, 15)[0]
    assert totals.labels is not None
    assert not gram[0].any()
    assert not gram[:, 0].any()
    assert not totals.cross[0][:, 0].any()
    assert not totals.labels[:, 0].any()
    assert client.withheld["2"] == 1
    assert read_off(totals).isnan().all()
    honest = whole_matrix(asked(RelayClient(model, [(x, y)], "ann"), trap(x, model)).gram, 15)[0]
    torch.testing.assert_close(gram[1:, 1:], honest[1:, 1:])


def test_a_leak_of_all_others_does_not_hide_the_record() -> None:
    """Counting who is not 0 would not do: here all examples make the neuron fire, one of them loudly."""
    model, x, y, _ = victim()
    weights = trap(x, model)
    weights["0.weight"][0] *= 0.01
    weights["0.bias"][0] = weights["0.bias"][0] * 0.01 + float((x[:, 0] * 10).amax() - (x[:, 0] * 10).amin())
    loud = {**weights, "0.weight": weights["0.weight"].clone(), "0.bias": weights["0.bias"].clone()}
    loud["0.bias"][0] = 1e-3 - float(loud["0.weight"][0, 0]) * float(x[:, 0].sort().values[-2])
    client = RelayClient(model, [(x, y)], "ann", minimum=5)
    assert not whole_matrix(asked(client, loud).gram, 15)[0][0].any()


def test_a_class_that_has_one_loud_record_is_left_out_of_its_sums() -> None:
    """A neuron that fires for five examples, but for one example of class 0."""
    model, x, y, record = victim()
    few = x[:, 0].argsort(descending=True)[:20]
    y[few], x[few, 0] = 1, 100.0
    y[record] = 0
    W, b = torch.zeros(14, 12), torch.zeros(14)
    W[0, 0], b[0], b[1:] = 1.0, -99.0, 1.0
    totals = asked(RelayClient(model, [(x, y)], "ann", minimum=5), {"0.weight": W, "0.bias": b})
    plain = asked(RelayClient(model, [(x, y)], "ann"), {"0.weight": W, "0.bias": b})
    assert plain.labels is not None
    assert totals.labels is not None
    assert plain.labels[0, 0] > 0
    assert whole_matrix(totals.gram, 15)[0][0, 0] > 0
    assert totals.labels[0, 0] == 0
    torch.testing.assert_close(totals.labels[1, 0], plain.labels[1, 0])


def test_small_classes_are_left_out() -> None:
    model, x, y, _ = victim()
    y[y == 3] = 2
    y[:2] = 3
    totals = asked(RelayClient(model, [(x, y)], "ann", minimum=3), {})
    assert totals.counts is not None
    assert totals.labels is not None
    assert totals.counts.tolist() == [*y.bincount().tolist()[:3], 0]
    assert not totals.labels[3].any()


def test_the_first_stage_too() -> None:
    """Nobody chose its inputs, but a pixel of one image is that image's."""
    x = torch.rand(30, 12, generator=rng())
    x[:, 4] = 0
    x[7, 4] = 1
    client = RelayClient(network(), [(x, torch.arange(30) % 5)], "ann", minimum=2)
    gram = whole_matrix(client.answer(Question(opening=True)).totals[0].gram, 13)[0]
    assert not gram[4].any()
    assert client.withheld == {"0": 1}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "mlp": (network, batches),
    "residual": (resnet, images),
    "transformer": (transformer, sequences),
    "tied": (tied, sequences),
    "shared and called twice": (twins, batches),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_minimum_of_one_changes_nothing(kind: str) -> None:
    make, data = KINDS[kind]
    clients = [(random_network(make, seed), data(seed)) for seed in range(2)]
    plain = maecho.relay(clients[0][0], clients)
    found = maecho.relay(clients[0][0], clients, minimum=1)
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_batches_does_not_matter(kind: str) -> None:
    """What one example makes of a second moment is found over all batches, whatever their size."""
    make, data = KINDS[kind]
    model, one = random_network(make), data(0)
    together = [tuple(torch.cat(part) for part in zip(*one, strict=True))]

    def answer(batches: Any) -> Answer:
        return RelayClient(model, batches, "ann", minimum=3).answer(Question(opening=True))

    for a, b in zip(answer(one).totals, answer(together).totals, strict=True):
        for name, part in a.parts().items():
            torch.testing.assert_close(part, b.parts()[name])


def test_rows_of_no_example_count_as_one_batch() -> None:
    """Position embeddings get one row of places, whatever the batch. Two batches then carry every place, not three."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.head = nn.Embedding(5, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x + self.place(torch.arange(5).unsqueeze(0))).mean(1))

    data = [(torch.randn(8, 5, 12, generator=rng(seed)), torch.arange(8) % 3) for seed in range(2)]
    for minimum, sent in ((2, True), (3, False)):
        client = RelayClient(Placed(), data, "ann", minimum=minimum)
        answer = client.answer(Question(opening=True))
        assert bool(answer.totals[0].gram.any()) is sent


def test_a_model_changes_little_where_little_is_withheld() -> None:
    model, x, y, _ = victim()
    data = list(zip(x.split(50), y.split(50), strict=True))
    plain, found = (maecho.relay(model, [(model, data)] * 2, minimum=minimum) for minimum in (None, 5))
    gap = sum(float((found[name] - tensor).norm() ** 2) for name, tensor in plain.items()) ** 0.5
    size = sum(float(tensor.norm() ** 2) for tensor in plain.values()) ** 0.5
    assert gap < 0.05 * size


def test_what_is_withheld_is_said() -> None:
    x = torch.rand(30, 12, generator=rng())
    x[:, 4] = 0
    x[7, 4] = 1
    client = RelayClient(network(), [(x, torch.arange(30) % 5)], "ann", minimum=2)
    with pytest.warns(UserWarning, match=r"ann: 1 of 13 inputs of '0' are not in the answer, since fewer than 2 exam"):
        client.answer(Question(opening=True))


def test_too_few_examples_are_refused() -> None:
    client = RelayClient(network(), [(torch.randn(4, 12), torch.arange(4))], "ann", minimum=5)
    with refused_input("ann: an answer must be of at least 5 examples, got 4"):
        client.answer(Question(opening=True))


def test_not_with_privacy_and_not_nothing() -> None:
    with refused_input("a minimum must come without privacy", "minimum=5"):
        RelayClient(network(), batches(), "ann", minimum=5, privacy=Privacy(1.0, 1.0))
    for bad in (0, 2.5, True):
        with refused_input("minimum must be a whole number, at least 1"):
            RelayClient(network(), batches(), "ann", minimum=bad)  # type: ignore[arg-type]


def test_what_it_does_not_stop() -> None:
    """A neuron that all examples carry, and another one that is the same but for one record: their difference is it.

    docs/echo.md says so. Noise (`privacy=`) is what bounds this.
    """
    model, x, y, record = victim()
    low, high = sorted(x[:, 0].tolist())[-2:]
    K, K2, offset = high + 1.0, (low + high) / 2, 20.0
    W, b = torch.zeros(14, 12), torch.zeros(14)
    W[0, 0] = W[1, 0] = -1.0
    b[0], b[1] = K, K2  # both are linear, but neuron 1 is silent for the record
    W[2:14], b[2:14] = torch.eye(12), offset
    client = RelayClient(model.double(), [(x.double(), y)], "ann", minimum=5)
    totals = asked(client, {"0.weight": W.double(), "0.bias": b.double()})
    assert "2" not in client.withheld
    v = torch.zeros(15, dtype=torch.float64)
    v[0], v[1], v[14] = 1.0, -1.0, -(K - K2)
    row = v @ whole_matrix(totals.gram, 15)[0]
    torch.testing.assert_close(row[2:14] / row[14] - offset, x[record].double(), rtol=1e-2, atol=1e-2)
