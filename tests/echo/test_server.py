"""The server: clients miss rounds, rounds fail, and stages are asked for in the right order."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho import RelayClient, RelayServer, relay
from maecho.echo import merging
from maecho.echo.simulated import Drawing
from support.clients import Net, batches
from support.clients import network as mlp
from support.relays import (
    play,
    random_network,
    relay_clients,
    same,
)
from support.tiny import NAN, refused_input


class TestComingAndGoing:
    """Clients miss rounds, rounds fail, and servers die."""

    def test_a_client_may_miss_rounds_and_come_back(self) -> None:
        clients, server = relay_clients(), RelayServer(mlp(dtype=torch.float64), minimum=2)
        here = iter([clients[:2], clients[1:], clients])
        while not server.done:
            question = server.broadcast()
            server.collect(client.answer(question) for client in next(here))
        assert server.clients_answered == [2, 2, 3]
        # The first layer is that of the first two alone.
        same(
            {"0": server.result()["0.weight"]},
            {"0": play(RelayServer(mlp(dtype=torch.float64)), clients[:2])["0.weight"]},
            1e-9,
        )

    @pytest.mark.parametrize("stage", [0, 1])
    def test_too_few_answers_change_nothing_and_the_round_is_asked_again(self, stage: int) -> None:
        clients, server = relay_clients(), RelayServer(mlp(dtype=torch.float64), minimum=2)
        for _ in range(stage):
            question = server.broadcast()
            server.collect([c.answer(question) for c in clients])
        before = server.broadcast().tensors()
        for few in (clients[:1], []):
            with refused_input(f"round {stage}: at least 2 client(s) must answer, got {len(few)}; ask again"):
                server.collect([c.answer(before) for c in few])
        same(server.broadcast().tensors(), before)
        same(play(server, clients), play(RelayServer(mlp(dtype=torch.float64)), clients))

    @pytest.mark.parametrize("stage", [0, 1])
    def test_a_bad_answer_changes_nothing(self, stage: int) -> None:
        clients, server = relay_clients(), RelayServer(mlp(dtype=torch.float64))
        for _ in range(stage):
            question = server.broadcast()
            server.collect([c.answer(question) for c in clients])
        question = server.broadcast().tensors()
        good = [c.answer(question).tensors() for c in clients]
        name = ["0", "2"][stage]
        bad: list[tuple[Any, str]] = [
            ([], "got 0"),
            ([None], "must be a dictionary of tensors, got NoneType"),
            ([{}], "of how many clients they are, got none"),
            ([{k: t for k, t in good[0].items() if k != "examples"}], "of how many examples they are, got none"),
            ([{**good[0], f"sum/{name}/gram": good[0][f"sum/{name}/gram"] * NAN}], "must be finite, got NaN"),
            ([good[0], {**good[1], "more": torch.ones(1)}], "answer 1: an answer must hold keys that mean something"),
            ([{**good[0], f"sum/{name}/more": torch.ones(1)}], f"got 'sum/{name}/more'"),
            ([good[0], {**good[1], "plain/more": torch.ones(1)}], "got 'plain/more' in one of them alone"),
            ([good[0], {**good[1], f"sum/{name}/cross": torch.ones(2)}], "got (2,)"),
            ([{**good[0], f"sum/{name}/cross": [1.0]}], "must be a tensor, got list"),
            ([{k: t for k, t in good[0].items() if not k.endswith("/cross")}], f"the sums of '{name}', got none"),
            ([{**good[0], f"sum/{name}/cross": torch.ones(1, 2, 3)}], "got (1, 2, 3)"),
            ([{**good[0], f"sum/{name}/gram": torch.ones(1, 7)}], "numbers, got (1, 7)"),
            ([{**good[0], f"sum/{name}/gram": torch.ones(5, 91)}], "numbers, got (5, 91)"),
            ([{**good[0], f"sum/{name}/gram": torch.ones(1, 3, 13)}], "numbers, got (1, 3, 13)"),
            ([{**good[0], f"sum/{name}/gram": good[0][f"sum/{name}/gram"].long()}], "real numbers, got torch.int64"),
            ([{**good[0], f"sum/{name}/prior": torch.tensor(1.0)}], f"round {stage}: answer 0: the sums of '{name}'"),
            ([{**good[0], "examples": torch.zeros(())}], "of how many examples they are, got 0.0"),
            ([{**good[0], "examples": torch.ones(2)}], "of how many examples they are, got [1.0, 1.0]"),
        ]
        if stage == 1:
            bad.append(([{**good[0], "sum/2/labels": torch.ones(5, 3)}], "labels of '2' must be (5, 10), got (5, 3)"))
            bad.append(([{**good[0], "sum/2/counts": torch.ones(())}], "must be (0, 10), got (5, 10)"))
        if stage == 0:
            without = {k: t for k, t in good[0].items() if k != "stage/4"}
            bad.append(([without], "answer 0: the last layer must have a stage, got '4', which has none"))
            bad.append(([{k: t for k, t in without.items() if k != "head/4"}], "got none for '4.weight'"))
            bad.append(([{**good[0], "stage/9": torch.tensor(0)}], "got '9', which it does not have"))
            bad.append(([{**good[0], "plain/9": torch.ones(1)}], "got '9' (1,)"))
            bad.append(([good[0], {**good[1], "stage/4": torch.tensor(1)}], "must be 2 as for the others, got 1"))
            bad.append(([good[0], {**good[1], "stage/4": torch.tensor(7)}], "answer 1: answers must number the stages"))
        for answers, said in bad:
            with refused_input(said):
                server.collect(answers)
            same(server.broadcast().tensors(), question)
        same(play(server, clients), play(RelayServer(mlp(dtype=torch.float64)), clients))

    def test_a_crash_in_the_first_round_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clients, opening = relay_clients(), RelayServer(mlp(dtype=torch.float64))
        answers = [c.answer(opening.broadcast()) for c in clients]

        def crash(*_: Any) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as broken:
            broken.setattr(merging, "fitted", crash)
            with pytest.raises(RuntimeError, match="out of luck"):
                opening.collect(answers)
        assert opening.broadcast().tensors().keys() == {"round", "open"}
        same(play(opening, clients), play(RelayServer(mlp(dtype=torch.float64)), clients))

    def test_questions_at_the_wrong_time(self) -> None:
        server = RelayServer(mlp())
        with refused_input("every stage must be fitted, got 0 of unknown"):
            server.result()
        clients = relay_clients(dtype=torch.float32)
        server.collect([c.answer(server.broadcast()) for c in clients])
        with refused_input("every stage must be fitted, got 1 of 3"):
            server.result()
        play(server, clients)
        with refused_input("a stage left to ask for", "got a network that is fitted"):
            server.broadcast()
        with refused_input("a stage left to fit", "got answers"):
            server.collect([])


class Counting(nn.Linear):
    """A layer that counts how often any layer of its class runs."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.passes += 1
        return super().forward(x)


def counting(seed: int = 0) -> nn.Module:
    return random_network(
        lambda: nn.Sequential(Counting(12, 9), nn.ReLU(), Counting(9, 7), nn.ReLU(), Counting(7, 5)), seed
    )


def test_the_recipe_says_how_long_it_took() -> None:
    began = time.perf_counter()
    server = RelayServer(counting(9))
    client = RelayClient(counting(0), batches(0), "ann", progress=False)
    while not server.done:
        server.collect([client.answer(server.broadcast())])
    assert 0 < server.result().recipe["seconds"] <= time.perf_counter() - began + 1e-3


class TestWhenItIsDone:
    """Reading `done` changes nothing. `broadcast`, `collect` and `result` fit the stages."""

    pairs = tuple((counting(i), batches(i)) for i in range(2))

    def server(self, rounds: Any) -> RelayServer:
        options: dict[str, Any] = {}
        if rounds != "all":
            sent = [maecho.make_upload(m, b, f"{i}", rank=None) for i, (m, b) in enumerate(self.pairs)]
            options = {"uploads": sent, "drawing": Drawing(100)}
        return RelayServer(counting(9), rounds=rounds, **options)

    def done(self, server: RelayServer) -> bool:
        """Reading it twice runs nothing and changes nothing."""
        before = Counting.passes, server.stages, server.clients_answered
        weights = {name: t.clone() for name, t in server._merged.network.state_dict().items()}
        found = server.done
        assert server.done is found
        assert (Counting.passes, server.stages, server.clients_answered) == before
        same(server._merged.network.state_dict(), weights)
        return found

    @pytest.mark.parametrize(
        ("rounds", "asked", "left"),
        [("all", [0, 1, 2], 0), (1, [], 3), (2, [2], 0), (["2"], [1], 1), (["0"], [0], 2), (["0", "2"], [0, 1], 1)],
    )
    def test_it_is_whether_nothing_is_left_to_ask(self, rounds: Any, asked: list[int], left: int) -> None:
        server, found = self.server(rounds), []
        clients = [RelayClient(*pair) for pair in self.pairs]
        assert self.done(server) is (rounds == 1)
        while not self.done(server):
            question = server.broadcast()
            found.append(question.round)
            assert not self.done(server)
            server.collect(client.answer(question) for client in clients)
        assert found == asked
        assert len(server.clients_answered) == (0 if rounds == 1 else 3 - left)
        before = Counting.passes
        merged = server.result()
        assert (Counting.passes > before) is (left > 0)
        assert self.done(server)
        inputs = [stage["inputs"] for stage in merged.recipe["rounds"]]
        assert inputs == ["real" if k in asked else "drawn" for k in range(3)]
        same(server.result(), merged)

    def test_stages_at_drawn_inputs_can_be_fitted_before_they_are_needed(self) -> None:
        server = self.server(["2"])
        server.fit_drawn()
        assert server.clients_answered == [0]
        before = Counting.passes
        server.fit_drawn()
        assert (Counting.passes, server.broadcast().round) == (before, 1)

    def test_nothing_is_asked_when_it_is_done(self) -> None:
        server = self.server(1)
        with refused_input("a stage left to ask for", "got a network whose other stages are at drawn inputs"):
            server.broadcast()
        with refused_input("a stage left to fit", "got answers for a network whose other stages are at drawn inputs"):
            server.collect([])
        with refused_input("every stage must be fitted, got 0 of unknown"):
            self.server(2).result()

    @pytest.mark.filterwarnings("ignore:.*(not sent|nothing of)")
    @pytest.mark.parametrize("rounds", [["idle"], ["body", "idle"]])
    @pytest.mark.filterwarnings(
        "ignore:.*these are averaged, since no module of that name ran on the first batch. idle"
    )
    def test_layers_that_never_run(self, rounds: list[str]) -> None:
        def make(seed: int) -> nn.Module:
            parts = {"body": nn.Linear(12, 5), "idle": nn.Linear(3, 3)}
            return random_network(lambda: Net(lambda net, x: net.body(x), **parts), seed)

        pairs = [(make(i), batches(i)) for i in range(2)]
        sent = [maecho.make_upload(m, b, f"{i}", rank=None) for i, (m, b) in enumerate(pairs)]
        said = "rounds must name layers that run, got 'idle', which never does"
        server = RelayServer(make(9), rounds=rounds, uploads=sent)
        for _ in range(2):
            with refused_input(said):
                server.broadcast()
        with refused_input(said):
            RelayServer(make(9), rounds=rounds, uploads=sent, start=make(8).state_dict())
        with refused_input(said):
            relay(make(9), pairs, rounds=rounds)


@pytest.mark.parametrize("name", ["uploads", "drawing", "start"])
def test_what_would_be_ignored_is_refused(name: str) -> None:
    """With real data at every layer nothing is drawn, and nothing is fitted before the first round."""
    model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
    sent = [maecho.make_upload(m, b, f"{i}", rank=None) for i, (m, b) in enumerate(pairs)]
    given: dict[str, Any] = {"uploads": sent, "drawing": Drawing(300), "start": model.state_dict()}
    said = {"start": "start must come with uploads"}.get(name, f"{name} must be left out with rounds='all'")
    with refused_input(said):
        RelayServer(model, **{name: given[name]})
    with refused_input(said):
        relay(model, pairs, **{name: given[name]})
