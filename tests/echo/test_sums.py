"""Sums that fit no unit, and how few clients may answer where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from maecho import RelayClient, RelayServer, make_upload
from maecho.echo.messages import add_up
from maecho.echo.simulated import Drawing
from maecho.echo.totals import UnitTotals, sums_of
from maecho.network.units import network
from support.clients import batches
from support.clients import network as mlp
from support.tiny import refused_input


def zeros(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layer", "right", "wrong"),
    [(nn.Linear(2, 4), (1, 6), (1, 1, 3)), (nn.Embedding(3, 4), (1, 1, 3), (1, 6))],
    ids=["numbers", "tokens"],
)
def test_whether_a_gram_is_a_diagonal_is_said_by_the_layer(layer: nn.Module, right: Any, wrong: Any) -> None:
    """Either form is a sound message; the network says which one it must be."""
    (unit,) = network(nn.Sequential(layer)).values()
    shape, device = (1, 4, 3), torch.device("cpu")
    found = sums_of(unit, shape, UnitTotals("0", zeros(*right), zeros(*shape), zeros(*shape)), device)
    assert found.gram.shape == ((1, 3, 3) if isinstance(layer, nn.Linear) else (1, 1, 3))
    with refused_input(f"Σ h hᵀ of '0' must be {right} numbers", f"got {wrong}"):
        sums_of(unit, shape, UnitTotals("0", zeros(*wrong), zeros(*shape), zeros(*shape)), device)
    with refused_input("the sums of '0' must be (1, 4, 2) as its weights", "got (1, 4, 3)"):
        sums_of(unit, (1, 4, 2), UnitTotals("0", zeros(*right), zeros(*shape), zeros(*shape)), device)


def test_a_minimum_is_of_answers_and_not_of_simulated_clients() -> None:
    uploads = [make_upload(mlp(i), batches(i), f"client-{i}", ["moments"], rank=None) for i in range(2)]
    server = RelayServer(mlp(), rounds=2, uploads=uploads, minimum=3, drawing=Drawing(draws=100))
    clients = [RelayClient(mlp(i % 2), batches(i % 2), f"client-{i}") for i in range(3)]
    question = server.broadcast()
    assert server.clients_answered == [0, 0]
    with refused_input("at least 3 client(s) must answer, got 2; ask again"):
        server.collect(client.answer(question) for client in clients[:2])
    server.collect(client.answer(question) for client in clients)
    assert server.done
    assert server.clients_answered == [0, 0, 3]


def test_the_size_of_answers_is_that_of_the_largest_wherever_it_comes() -> None:
    server = RelayServer(mlp())
    whole = RelayClient(mlp(), batches()).answer(server.broadcast()).tensors()
    half = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in whole.items()}
    size = sum(tensor.nbytes for tensor in whole.values())
    for order in ([whole, half], [half, whole], [half, whole, half]):
        total, largest = add_up(order)
        assert largest == size
        assert total is not None
        assert float(total.clients) == len(order)
    assert add_up([]) == (None, 0)


@pytest.mark.parametrize("bare", [0, 3])
def test_labels_of_some_examples_are_no_use_beside_sums_over_all(bare: int) -> None:
    data: list[Any] = list(batches())
    data[bare] = data[bare][0]
    server = RelayServer(mlp())
    client = RelayClient(mlp(), data)
    server.collect([client.answer(server.broadcast())])
    answer = client.answer(server.broadcast())
    (totals,) = answer.totals
    assert float(answer.examples) == 64
    assert (totals.labels, totals.outputs, totals.counts) == (None, None, None)
    whole = RelayClient(mlp(), batches()).answer(server.broadcast()).totals[0]
    assert whole.labels is not None
    assert torch.equal(whole.gram, totals.gram)
