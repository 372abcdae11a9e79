"""A server that goes a part of the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from maecho import InputError
from maecho.rounds import Merging, Paced, Round
from maecho.rounds.choices import find_server
from maecho.rounds.peers import Average, Scaffold
from maecho.rounds.servers import Returned
from support.federations import clouds

Make = Callable[..., Round]


def of_classes(round_: Round, *labels: tuple[int, ...]) -> Round:
    """The same models, of clients with these labels."""
    changed = [
        Returned(one.client, one.weights, *clouds(one.examples, held, one.client))
        for one, held in zip(round_.returned, labels, strict=True)
    ]
    return replace(round_, returned=changed)


def test_a_part_of_the_way_but_for_new_classes(make_round: Make) -> None:
    server, rounds = Paced(Average(), 0.25), [of_classes(make_round(number=k), (0, 1), (0, 2)) for k in (1, 2)]
    whole = [Average()(one, {}).weights for one in rounds]
    first = server(rounds[0], {})
    second = server(rounds[1], first.state)
    third = server(of_classes(rounds[1], (0, 1), (3, 2)), first.state)
    for name, start in rounds[1].weights.items():
        torch.testing.assert_close(first.weights[name], whole[0][name])
        torch.testing.assert_close(second.weights[name], 0.75 * start + 0.25 * whole[1][name])
        torch.testing.assert_close(third.weights[name], whole[1][name])
    assert second.state["classes seen"].tolist() == [0, 1, 2]
    assert third.state["classes seen"].tolist() == [0, 1, 2, 3]
    assert first.bytes == Average()(rounds[0], {}).bytes


def test_the_server_inside_has_its_state_and_its_correction(make_round: Make) -> None:
    one, inside = make_round(), Scaffold()
    state = inside(one, {}).state
    assert inside.correction(one.weights, state, 0).offset is not None
    outcome = Paced(inside, 0.5)(one, {})
    assert outcome.state.keys() == state.keys() | {"classes seen"}
    own, given = (s.correction(one.weights, outcome.state, 0).offset for s in (Paced(inside, 0.5), inside))
    assert own is not None and given is not None  # noqa: PT018
    assert all(torch.equal(own[name], given[name]) for name in given)
    again = Paced(inside, 0.5)(make_round(number=2), outcome.state)
    expected = inside(make_round(number=2), state)
    assert all(torch.equal(again.state[name], expected.state[name]) for name in expected.state)


def test_counters_are_those_of_the_new_model(make_round: Make) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    returned = [
        Returned(i, {**weights, "1.num_batches_tracked": torch.tensor(7), "0.bias": weights["0.bias"] + 1},
                 *clouds(20, (0, 1), i)) for i in range(2)
    ]  # fmt: skip
    base = make_round(weights=weights, returned=returned, network=model, trained=frozenset(weights))
    seen = {"classes seen": torch.tensor([0, 1])}
    found = Paced(Average(), 0.25)(base, seen).weights
    assert int(found["1.num_batches_tracked"]) == 7
    torch.testing.assert_close(found["0.bias"], weights["0.bias"] + 0.25)


@pytest.mark.parametrize("pace", [0, -0.5, 1.5, "fast", float("nan")])
def test_bad_paces(pace: Any) -> None:
    with pytest.raises(InputError, match="pace must be above 0 and at most 1, got"):
        Paced(Average(), pace)


def test_every_server_by_name_takes_a_pace() -> None:
    assert find_server("fedavg", {"pace": 0.5}) == Paced(Average(), 0.5)
    assert find_server("regmean", {"kept": 0.7, "pace": 0.2}) == Paced(Merging("regmean", kept=0.7), 0.2)
    assert find_server("fedavg", {"pace": 1}) == Average()
    with pytest.raises(InputError, match="pace must be above 0 and at most 1, got 0"):
        find_server("fedavg", {"pace": 0})
