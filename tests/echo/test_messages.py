"""Messages: validated at birth, added up by a law, and carried as plain dictionaries of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn

from maecho import RelayServer
from maecho.echo import wire
from support.clients import network as mlp
from support.clients import rng
from support.relays import (
    made,
    made_clients,
    play,
    same,
)


class TestMessages:
    """Plain dictionaries of tensors, of which the server uses totals alone."""

    def test_only_totals_matter(self, kind: Any) -> None:
        """Noise on every real number that cancels in the total changes nothing but round-off."""
        clients, server = made_clients(kind), RelayServer(made(kind[0], 9, torch.float64))
        expected = play(RelayServer(made(kind[0], 9, torch.float64)), clients)
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
        clients = made_clients(kind, 2, torch.float32)
        for client in clients:  # memory that files do not take as it is
            for module in client._own.modules():
                if isinstance(module, nn.Conv2d):
                    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        direct, server = play(RelayServer(made(kind[0], 9)), clients), RelayServer(made(kind[0], 9))
        while not server.done:
            question = load(save(server.broadcast().tensors()))
            server.collect(load(save(client.answer(question).tensors())) for client in clients)
        same(server.result(), direct)

    def test_a_question_does_not_change_with_what_comes_after(self) -> None:
        clients, server = made_clients(), RelayServer(mlp(dtype=torch.float64))
        server.collect([c.answer(server.broadcast()) for c in clients])
        question = server.broadcast()
        before = {key: t.clone() for key, t in question.tensors().items()}
        play(server, clients)
        same(question.tensors(), before)
        server.result()["0.weight"].zero_()
        assert float(server.result()["0.weight"].abs().sum()) > 0

    def test_order_of_clients_does_not_matter(self, kind: Any) -> None:
        clients = made_clients(kind)
        server = lambda: RelayServer(made(kind[0], 9, torch.float64))  # noqa: E731
        same(play(server(), clients), play(server(), clients[::-1]), 1e-7)

    def test_only_what_is_settled_is_told(self) -> None:
        clients, server = made_clients(), RelayServer(mlp(dtype=torch.float64))
        assert server.broadcast().tensors().keys() == {"round", "open"}
        server.collect(c.answer(server.broadcast()) for c in clients)
        told = {"round", "head/4", "unit/2", "weights/0.weight", "weights/0.bias"}
        assert server.broadcast().tensors().keys() == told
        said = {"gram", "cross", "prior", "labels", "outputs", "counts"}
        answer = clients[0].answer(server.broadcast()).tensors()
        assert answer.keys() == {"clients", "examples", *(f"sum/2/{s}" for s in said)}

    def test_what_is_symmetric_is_told_once(self) -> None:
        server = RelayServer(mlp(dtype=torch.float64))
        answer = made_clients()[0].answer(server.broadcast()).tensors()
        assert answer["sum/0/gram"].shape == (1, 13 * 14 // 2)
        whole = torch.randn(2, 5, 5, generator=rng())
        whole = whole + whole.mT
        assert torch.equal(wire.whole_matrix(wire.upper_triangle(whole), 5), whole)
        row = torch.ones(1, 1, 4)
        assert torch.equal(wire.whole_matrix(wire.upper_triangle(row), 4), row), "of a diagonal all is told"

    def test_the_server_says_how_large_they_were(self, tmp_path: Path) -> None:
        clients, path = made_clients(), tmp_path / "relay.safetensors"
        server, sizes = RelayServer(mlp(dtype=torch.float64), checkpoint=path), []
        while not server.done:
            answers = [client.answer(server.broadcast()) for client in clients]
            sizes.append(max(sum(t.nbytes for t in answer.tensors().values()) for answer in answers))
            server.collect(answers)
        assert [stage["bytes"] for stage in server.result().recipe["rounds"]] == server.answer_bytes == sizes
        other = RelayServer(mlp(dtype=torch.float64))
        other.resume(path)
        assert other.answer_bytes == sizes
