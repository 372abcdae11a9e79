"""The client: its answers, and one sentence for each kind of bad data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from maecho import RelayClient, RelayServer, relay
from support.clients import Net, batches
from support.clients import network as mlp
from support.relays import (
    PLAIN,
    play,
    relay_clients,
    same,
)
from support.tiny import NAN, refused_input


def test_no_layer_of_raw_inputs_sends_sums_by_class() -> None:
    """Their sums by class would be the mean inputs of classes. A second question does not give them either."""
    client = relay_clients()[0]
    opening = client.answer({"open": torch.ones(1)}).tensors()
    again = client.answer({"unit/0": torch.ones(1), "head/4": torch.ones(1)}).tensors()
    for answer in (opening, again):
        assert {key for key in answer if key.startswith("sum/")} == {f"sum/0/{s}" for s in ("gram", "cross", "prior")}
    alone = RelayClient(nn.Linear(12, 5), batches()).answer({"open": torch.ones(1)}).tensors()
    assert "sum//labels" in alone  # nothing but a head


class TestBadClients:
    """One sentence each."""

    @pytest.mark.filterwarnings("ignore:ann. these are averaged, since no module of that name ran")
    def test_another_architecture(self) -> None:
        narrow = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5))
        deep = nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(5, 5))
        with refused_input("answer 1", "'sum/0/cross' must be (1, 9, 13), got (1, 8, 13)"):
            relay(mlp(), [(mlp(), batches()), (narrow, batches())])
        with refused_input("answer 1", "must hold what the first one holds", "one network"):
            relay(mlp(), [(mlp(), batches()), (deep, batches())])
        with refused_input("the sums of '0' must be (1, 9, 13) as its weights, got (1, 8, 13)"):
            relay(mlp(), [(narrow, batches())])
        with refused_input("got '6', which it does not have"):
            relay(mlp(), [(deep, batches())])
        with refused_input("answers must be of the server's network, got none for '6.weight'"):
            relay(deep, [(mlp(), batches())])
        server = RelayServer(mlp())
        server.collect([RelayClient(mlp(), batches()).answer(server.broadcast())])
        with refused_input("ann: the server's '0.bias' must be of this client's network ((8,)), got (9,)"):
            RelayClient(narrow, batches(), "ann").answer(server.broadcast())
        with refused_input("ann: sums must be of layers of this network, got '9'"):
            RelayClient(mlp(), batches(), "ann").answer({"unit/9": torch.ones(1)})
        idle = Net(lambda net, x: net.body(x), body=nn.Linear(12, 5), idle=nn.Linear(3, 3))
        with refused_input("ann: sums must be of layers that run, got 'idle', which never does"):
            RelayClient(idle, batches(), "ann").answer({"unit/idle": torch.ones(1)})

    def test_another_order_of_execution(self) -> None:
        def net(first: str, second: str) -> nn.Module:
            forward = lambda net, x: getattr(net, second)(getattr(net, first)(x).relu())  # noqa: E731
            return Net(forward, a=nn.Linear(12, 12), b=nn.Linear(12, 12))

        with refused_input("answer 1", "must hold what the first one holds", "'head/a'", "one network"):
            relay(net("a", "b"), [(net("a", "b"), batches()), (net("b", "a"), batches())])

    def test_labels_in_one_of_them_alone(self) -> None:
        bare = [x for x, _ in batches(1)]
        server = RelayServer(mlp())
        clients = [RelayClient(mlp(), batches()), RelayClient(mlp(), bare)]
        with refused_input("answer 1", "'sum/2/counts' in one of them alone", "all have labels or none"):
            play(server, clients)
        assert server.clients_answered == [2]

    def test_labels_of_some_batches_are_labels_of_none(self) -> None:
        some = [batches()[0], *(x for x, _ in batches()[1:])]
        bare = [x for x, _ in batches()]
        same(relay(mlp(), [(mlp(1), some)]), relay(mlp(), [(mlp(1), bare)]))
        same(relay(mlp(), [(mlp(1), bare)]), relay(mlp(), [(mlp(1), batches())], regression=PLAIN))

    def test_labels_that_are_no_classes(self) -> None:
        x = batches()[0][0]
        with pytest.warns(UserWarning, match="client 0: no labels are used .* labels must lie in 0 … 4, .*got 9"):
            found = relay(mlp(), [(mlp(1), [(x, torch.full((16,), 9))])])
        same(found, relay(mlp(), [(mlp(1), [x])]))

    def test_batches_that_are_used_up(self) -> None:
        def generator() -> Iterator[Any]:
            yield from batches()

        for used_up in (generator(), iter(batches())):
            with refused_input(
                "client 0: the batches must be something that can be gone through once a round", "got a "
            ):
                relay(mlp(), [(mlp(), used_up)])

    @pytest.mark.parametrize("nothing", [[], [torch.zeros(0, 12)], [(torch.zeros(0, 12), torch.zeros(0))]])
    def test_no_examples(self, nothing: list[Any]) -> None:
        with refused_input("client 0: the batches must hold at least one example, got none"):
            relay(mlp(), [(mlp(), nothing)])

    def test_empty_batches_among_others_are_passed_over(self) -> None:
        gaps = [(torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64)), *batches()]
        same(relay(mlp(), [(mlp(1), gaps)]), relay(mlp(), [(mlp(1), batches())]))

    def test_inputs_and_models_that_do_not_work(self) -> None:
        x, y = batches()[0]
        with refused_input("client 0: the inputs must be finite, got NaN"):
            relay(mlp(), [(mlp(), [(x * NAN, y)])])
        with refused_input("client 0: the inputs must be finite, got NaN"):
            relay(mlp(), [(mlp(), [(x, y), (x * NAN, y)])])
        with refused_input("client 0: the model must take its own batches, got an error"):
            relay(mlp(), [(mlp(), [(x[:, :3], y)])])
        broken = mlp()
        broken[0].weight.data.fill_(NAN)
        with refused_input("client 0: the network must give finite outputs", "got NaN"):
            relay(mlp(), [(broken, batches())])

    def test_models_that_cannot_be_copied(self) -> None:
        class Stubborn(nn.Linear):
            def __deepcopy__(self, memo: object) -> nn.Module:
                raise TypeError("not this one")

        with refused_input("client 0: the model must be one that copy.deepcopy can copy, got Stubborn: not this one"):
            relay(mlp(), [(Stubborn(12, 5), batches())])
        with refused_input("the model must be one that copy.deepcopy can copy", "got Stubborn"):
            RelayServer(Stubborn(12, 5))
