"""Messages: they are checked when they are made, add up by a law, and travel as plain dictionaries of tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from maecho import RelayClient, RelayServer
from maecho.echo import wire
from maecho.echo.messages import Answer, Opening, Question
from maecho.echo.totals import UnitTotals
from support.clients import batches, rng
from support.clients import network as mlp
from support.relays import (
    play,
    random_network,
    relay_clients,
    same,
)
from support.tiny import NAN, refused_input


class TestMessages:
    """The wire form is plain dictionaries of tensors. The server uses only their totals."""

    def test_only_totals_matter(self, kind: Any) -> None:
        """Masks on every real number that cancel in the total change only round-off."""
        clients, server = relay_clients(kind), RelayServer(random_network(kind[0], 9, torch.float64))
        expected = play(RelayServer(random_network(kind[0], 9, torch.float64)), clients)
        while not server.done:
            question = server.broadcast()
            answers = [client.answer(question).tensors() for client in clients]
            draw = rng(server.broadcast().round)
            for key, tensor in answers[0].items():
                if tensor.is_floating_point():
                    masks = 100 * torch.randn(3, *tensor.shape, generator=draw, dtype=torch.float64)
                    masks[2] = -masks[0] - masks[1]
                    for answer, mask in zip(answers, masks, strict=True):
                        answer[key] = answer[key] + mask
            server.collect(answers)
        same(server.result(), expected, 1e-6)

    def test_they_survive_files(self, kind: Any) -> None:
        clients = relay_clients(kind, 2, torch.float32)
        for client in clients:  # memory that files do not take as it is
            for module in client._own.modules():
                if isinstance(module, nn.Conv2d):
                    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        direct, server = play(RelayServer(random_network(kind[0], 9)), clients), RelayServer(random_network(kind[0], 9))
        while not server.done:
            question = load(save(server.broadcast().tensors()))
            server.collect(load(save(client.answer(question).tensors())) for client in clients)
        same(server.result(), direct)

    def test_a_question_does_not_change_with_what_comes_after(self) -> None:
        clients, server = relay_clients(), RelayServer(mlp(dtype=torch.float64))
        server.collect([c.answer(server.broadcast()) for c in clients])
        question = server.broadcast()
        before = {key: t.clone() for key, t in question.tensors().items()}
        play(server, clients)
        same(question.tensors(), before)
        server.result()["0.weight"].zero_()
        assert float(server.result()["0.weight"].abs().sum()) > 0

    def test_order_of_clients_does_not_matter(self, kind: Any) -> None:
        clients = relay_clients(kind)
        server = lambda: RelayServer(random_network(kind[0], 9, torch.float64))  # noqa: E731
        same(play(server(), clients), play(server(), clients[::-1]), 1e-7)

    def test_a_question_holds_only_settled_weights(self) -> None:
        clients, server = relay_clients(), RelayServer(mlp(dtype=torch.float64))
        assert server.broadcast().tensors().keys() == {"round", "open"}
        server.collect(c.answer(server.broadcast()) for c in clients)
        expected = {"round", "head/4", "unit/2", "weights/0.weight", "weights/0.bias"}
        assert server.broadcast().tensors().keys() == expected
        said = {"gram", "cross", "prior", "labels", "outputs", "counts", "squares"}
        answer = clients[0].answer(server.broadcast()).tensors()
        assert answer.keys() == {"clients", "examples", *(f"sum/2/{s}" for s in said)}

    def test_only_the_upper_triangle_of_a_symmetric_matrix_is_sent(self) -> None:
        server = RelayServer(mlp(dtype=torch.float64))
        answer = relay_clients()[0].answer(server.broadcast()).tensors()
        assert answer["sum/0/gram"].shape == (1, 13 * 14 // 2)
        whole = torch.randn(2, 5, 5, generator=rng())
        whole = whole + whole.mT
        assert torch.equal(wire.whole_matrix(wire.upper_triangle(whole), 5), whole)

    @pytest.mark.parametrize("tokens", [1, 4])
    def test_of_tokens_the_counts_are_told(self, tokens: int) -> None:
        """A diagonal is one by what the layer is, not by its shape: that of a single token is square."""

        def tokens_first(seed: int) -> nn.Sequential:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return nn.Sequential(nn.Embedding(tokens, 3), nn.Flatten(), nn.Linear(6, 2)).double()

        data = [(torch.arange(20).reshape(10, 2) % tokens, torch.arange(10) % 2)]
        clients = [RelayClient(tokens_first(i), data, f"client {i}") for i in range(2)]
        server = RelayServer(tokens_first(9))
        counts = clients[0].answer(server.broadcast()).tensors()["sum/0/gram"]
        assert torch.equal(counts, torch.full((1, 1, tokens), 20 / tokens, dtype=torch.float64))
        merged = play(server, clients)
        rows = torch.stack([tokens_first(i)[0].weight for i in range(2)]).mean(0)
        torch.testing.assert_close(merged["0.weight"], rows.detach())

    def test_the_server_says_how_large_they_were(self, tmp_path: Path) -> None:
        clients, path = relay_clients(), tmp_path / "relay.safetensors"
        server, sizes = RelayServer(mlp(dtype=torch.float64), checkpoint=path), []
        while not server.done:
            answers = [client.answer(server.broadcast()) for client in clients]
            sizes.append(max(sum(t.nbytes for t in answer.tensors().values()) for answer in answers))
            server.collect(answers)
        assert [stage["bytes"] for stage in server.result().recipe["rounds"]] == server.answer_bytes == sizes
        other = RelayServer(mlp(dtype=torch.float64))
        other.resume(path)
        assert other.answer_bytes == sizes


IN, OUT, CLASSES = 4, 3, 5


def totals(**changes: Any) -> UnitTotals:
    """The totals of one unit with four inputs and three outputs."""
    parts: dict[str, Any] = {"gram": torch.ones(1, IN * (IN + 1) // 2), "cross": torch.ones(1, OUT, IN)}
    parts |= {"prior": torch.ones(1, OUT, IN), "labels": torch.ones(CLASSES, IN), "outputs": torch.ones(CLASSES, OUT)}
    return UnitTotals("fc", **{**parts, "counts": torch.ones(CLASSES), **changes})


def answer(**changes: Any) -> Answer:
    opening = Opening({"fc": 0}, {"fc": "bn"}, "fc", {"place": torch.ones(2), "count": torch.tensor(3)})
    parts: dict[str, Any] = {"clients": torch.ones(()), "examples": torch.tensor(7.0), "totals": (totals(),)}
    return Answer(**{**parts, "opening": opening, **changes})


class TestBirth:
    """Messages are frozen, and checked when they are made."""

    def test_counts_add_up_in_float64(self) -> None:
        """In float32 one example more would be lost beyond 2²⁴ of them."""
        made = answer(clients=torch.ones((), dtype=torch.float32), examples=torch.tensor(2.0**24))
        assert made.clients.dtype == made.examples.dtype == torch.float64
        assert float((made + answer(examples=torch.ones(()))).examples) == 2**24 + 1

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"gram": None}, "gram of 'fc' must be a tensor, got NoneType"),
            ({"cross": [1.0]}, "cross of 'fc' must be a tensor, got list"),
            ({"gram": torch.ones(1, 10).long()}, "gram of 'fc' must be real numbers, got torch.int64"),
            ({"prior": torch.full((1, OUT, IN), NAN)}, "prior of 'fc' must be finite, got NaN"),
            ({"prior": torch.ones(OUT, IN)}, "the sums of 'fc' must be of groups, outputs and inputs, got (3, 4)"),
            ({"cross": torch.ones(1, OUT, 2)}, "the sums of 'fc' must be (1, 3, 4) as its weights, got (1, 3, 2)"),
            ({"gram": torch.ones(1, IN, IN)}, "must be (1, 10) or (1, 1, 4) numbers, got (1, 4, 4)"),
            ({"labels": torch.ones(2, IN)}, "labels of 'fc' must be (5, 4), got (2, 4)"),
            ({"outputs": torch.ones(CLASSES, IN)}, "outputs of 'fc' must be (5, 3), got (5, 4)"),
            ({"labels": None}, "sums by class of 'fc' must come with their counts, got outputs, counts alone"),
            ({"counts": None, "labels": torch.ones(0, IN), "outputs": torch.ones(0, OUT)}, "got labels, outputs alone"),
            ({"squares": torch.ones(1)}, "squares of 'fc' must be (2,), got (1,)"),
            (
                {"labels": None, "outputs": None, "counts": None, "squares": torch.ones(2)},
                "sums by class of 'fc' must come with their counts, got squares alone",
            ),
            ({"noise": torch.ones(2)}, "noise of 'fc' must be one number, got (2,)"),
            ({"unit": 3}, "the unit of totals must be a name, got int"),
        ],
    )
    def test_totals(self, changes: dict[str, Any], said: str) -> None:
        with refused_input(said):
            replace(totals(), **changes)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"clients": 1}, "clients must be a tensor, got int"),
            ({"clients": torch.tensor(NAN)}, "clients must be finite, got NaN"),
            ({"examples": torch.tensor(7)}, "examples must be real numbers, got torch.int64"),
            ({"examples": torch.ones(2)}, "of how many examples they are, got [1.0, 1.0]"),
            ({"totals": (totals(), totals())}, "must hold the sums of a layer once, got 'fc', 'fc'"),
            ({"totals": 3}, "the sums of an answer must be a sequence, got int"),
            ({"totals": ({"gram": 3},)}, "the sums of an answer must be UnitTotals, got dict"),
            ({"opening": {"fc": 0}}, "the opening of an answer must be an Opening, got dict"),
        ],
    )
    def test_answers(self, changes: dict[str, Any], said: str) -> None:
        with refused_input(said):
            answer(**changes)

    @pytest.mark.parametrize(
        ("made", "said"),
        [
            (lambda: Opening(3), "stages of an opening must be a mapping, got int"),  # type: ignore[arg-type]
            (lambda: Opening({3: 0}), "stages of an opening must have names as keys, got int"),  # type: ignore[dict-item]
            (lambda: Opening({"fc": -1}), "the stage of 'fc' must be a whole number, at least 0, got -1"),
            (lambda: Opening({"fc": 0.5}), "the stage of 'fc' must be a whole number, at least 0, got 0.5"),  # type: ignore[dict-item]
            (lambda: Opening({"fc": 0, "out": 2}), "answers must number the stages without a gap, got [0, 2]"),
            (lambda: Opening({"fc": 2}), "answers must number the stages without a gap, got [2]"),
            (lambda: Opening({"fc": 0}, {"fc": 3}), "the BatchNorm of 'fc' must be a name, got int"),  # type: ignore[dict-item]
            (lambda: Opening({"fc": 0}, {3: "bn"}), "joins of an opening must have names as keys, got int"),  # type: ignore[dict-item]
            (lambda: Opening({"fc": 0, "bn": 0}, {"fc": "bn"}), "with one layer alone, got 'bn' at 'fc' and elsewhere"),
            (lambda: Opening({"a": 0, "b": 0}, {"a": "n", "b": "n"}), "with one layer alone, got 'n' at 'b'"),
            (lambda: Opening({"fc": 0}, head=5), "the last layer must be a name, got int"),  # type: ignore[arg-type]
            (lambda: Opening({"fc": 0}, head="out"), "the last layer must have a stage, got 'out', which has none"),
            (lambda: Opening(plain={"place": 3}), "the weight 'place' must be a tensor, got int"),  # type: ignore[dict-item]
            (lambda: Opening(plain={"w": torch.ones(1) + 1j}), "'w' must be real numbers, got torch.complex64"),
            (lambda: Opening(plain={3: torch.ones(1)}), "plain of an opening must have names as keys, got int"),  # type: ignore[dict-item]
            (lambda: Opening({"fc": 0}, {"conv": "bn"}), "joined to a layer that has a stage, got 'conv'"),
            (lambda: Opening(plain={"place": torch.tensor(NAN)}), "the weight 'place' must be finite, got NaN"),
            (lambda: Question(-1), "must be a whole number, at least 0, got -1"),
            (lambda: Question(0.5), "must be a whole number, at least 0, got 0.5"),  # type: ignore[arg-type]
            (lambda: Question(weights={"w": 3}), "the weight 'w' of a question must be a tensor, got int"),  # type: ignore[dict-item]
            (
                lambda: Question(weights={3: torch.ones(1)}),
                "weights of a question must have names as keys, got int",
            ),  # type: ignore[dict-item]
            (lambda: Question(weights=[1]), "weights of a question must be a mapping, got list"),  # type: ignore[arg-type]
            (lambda: Question(opening=1), "opening of a question must be True or False, got 1"),  # type: ignore[arg-type]
            (lambda: Question(head=5), "the last layer must be a name, got int"),  # type: ignore[arg-type]
            (lambda: Question(units={5: 7}), "units of a question must have names as keys, got int"),  # type: ignore[dict-item]
            (lambda: Question(units={"fc": 7}), "the BatchNorm of 'fc' must be a name, got int"),  # type: ignore[dict-item]
            (lambda: Question(units={"fc": "bn", "bn": None}), "with one layer alone, got 'bn' at 'fc' and elsewhere"),
            (lambda: Question(opening=True, head="fc"), "must ask for nothing else, got layers or weights besides"),
        ],
    )
    def test_openings_and_questions(self, made: Callable[[], object], said: str) -> None:
        with refused_input(said):
            made()

    @pytest.mark.parametrize(
        ("message", "said"),
        [
            (3, "a question must be a dictionary of tensors, got int"),
            ({3: torch.ones(1)}, "a question must have strings as keys, got int"),
            ({"open": 1}, "'open' must be a tensor, got int"),
            ({"opne": torch.ones(1)}, "a question must hold keys that mean something there, got 'opne'"),
            ({"join/fc/bn": torch.ones(1)}, "a question must hold keys that mean something there, got 'join/fc/bn'"),
            ({"round": torch.tensor(1.5)}, "'round' must be one whole number, at least 0, got 1.5"),
            ({"head/a": torch.ones(1), "head/b": torch.ones(1)}, "a message must name one last layer, got 'a', 'b'"),
        ],
    )
    def test_questions_that_a_client_cannot_read(self, message: Any, said: str) -> None:
        with refused_input(f"ann: {said}"):
            RelayClient(mlp(), batches(), "ann").answer(message)

    def test_they_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            answer().clients = torch.ones(())  # type: ignore[misc]
        with pytest.raises(TypeError):
            Question(units={"fc": None}).units["more"] = None  # type: ignore[index]

    @pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
    def test_they_come_back_from_their_wire_form(self, copied: Callable[[Any], Any]) -> None:
        asked = Question(2, units={"a/b": "bn", "": None}, head="", weights={"w": torch.ones(2)})
        for message in (asked, answer(), answer(opening=None), Question(opening=True)):
            for back in (type(message).read(message.tensors()), copied(message)):
                same(back.tensors(), message.tensors())
                assert type(back) is type(message)
        back = Question.read(asked.tensors())
        assert (back.round, dict(back.units), back.head) == (2, {"a/b": "bn", "": None}, "")

    def test_a_gap_between_stages(self) -> None:
        server, client = RelayServer(mlp()), RelayClient(mlp(), batches())
        sent = client.answer(server.broadcast()).tensors()
        with refused_input("round 0: answer 0: answers must number the stages without a gap, got [0, 1, 7]"):
            server.collect([{**sent, "stage/4": torch.tensor(7)}])


class TestSums:
    """The law of +: the answer of two clients together is the sum of their answers."""

    def test_the_sum_is_that_of_the_wire_forms(self, kind: Any) -> None:
        server = RelayServer(random_network(kind[0], 9, torch.float64))
        one, other = (client.answer(server.broadcast()) for client in relay_clients(kind, 2))
        whole, (first, second) = (one + other).tensors(), (one.tensors(), other.tensors())
        assert whole.keys() == first.keys()
        for key, tensor in whole.items():
            if tensor.is_floating_point():
                assert torch.equal(tensor, first[key] + second[key]), key
            elif key.startswith("plain/"):
                assert torch.equal(tensor, first[key].maximum(second[key])), key
            else:
                assert torch.equal(tensor, first[key]), key
        same((other + one).tensors(), whole)

    def test_the_answer_for_two_halves_of_the_data_is_their_sum(self) -> None:
        model, data = mlp(dtype=torch.float64), batches(dtype=torch.float64)
        whole, one, two = (
            RelayClient(model, part).answer(Question(opening=True)) for part in (data, data[:1], data[1:])
        )
        both = (one + two).tensors()
        assert float(both.pop("clients")) == 2
        expected = whole.tensors()
        assert float(expected.pop("clients")) == 1
        same(both, expected, 1e-9)

    def test_what_does_not_add_up(self) -> None:
        one = answer()
        with refused_input("must hold what the first one holds, got 'sum/fc/noise' in one of them alone"):
            one + answer(totals=(totals(noise=torch.ones(())),))
        other = UnitTotals("fc", torch.ones(1, 10), torch.ones(1, 2, IN), torch.ones(1, 2, IN))
        with refused_input("'sum/fc/cross' must be (1, 3, 4), got (1, 2, 4)"):
            answer(totals=(totals(labels=None, outputs=None, counts=None),)) + answer(totals=(other,))
        later = Opening({"fc": 1}, {"fc": "bn"}, "fc", {"place": torch.ones(2), "count": torch.tensor(3)})
        with refused_input("'stage/fc' must be 0 as for the others, got 1"):
            one + answer(opening=later)
        odd = Opening({"fc": 0}, {"fc": "bn"}, "fc", {"place": torch.ones(2), "count": torch.tensor(3.0)})
        with refused_input("'plain/count' must be torch.int64 as for the others, got torch.float64"):
            one + answer(opening=odd)

    def test_a_network_may_hand_over_one_total(self, kind: Any) -> None:
        """The dictionaries are summed as secure aggregation does it, so the server never sees one client's answer."""
        clients, server = relay_clients(kind), RelayServer(random_network(kind[0], 9, torch.float64), minimum=3)
        while not server.done:
            question = server.broadcast().tensors()
            total = [client.answer(question).tensors() for client in clients]
            largest = {key: torch.stack([one[key] for one in total]).amax(0) for key in total[0]}
            real = {key for key, tensor in largest.items() if tensor.is_floating_point()}
            server.collect([largest | {key: sum(one[key] for one in total) for key in real}])
        same(server.result(), play(RelayServer(random_network(kind[0], 9, torch.float64)), clients), 1e-7)
        assert set(server.clients_answered) == {3}
