"""A server that goes on from the file of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import maecho
from maecho import RelayServer
from support.clients import batches
from support.clients import network as mlp
from support.relays import (
    made,
    made_clients,
    play,
    resnet,
    same,
)
from support.tiny import refused


@pytest.mark.parametrize("done", [1, 2])
def test_another_server_goes_on_from_the_file(kind: Any, done: int, tmp_path: Path) -> None:
    clients, path = made_clients(kind), tmp_path / "relay.safetensors"
    first = RelayServer(made(kind[0], 9, torch.float64), checkpoint=path)
    for _ in range(done):
        if not first.done:
            question = first.broadcast()
            first.collect([c.answer(question) for c in clients])
    second = RelayServer(made(kind[0], 8, torch.float64))
    second.resume(path)
    assert second.clients_answered == first.clients_answered
    assert second.stages == first.stages
    same(play(second, clients), play(first, clients))


def test_a_single_client_is_still_one_after_the_file(tmp_path: Path) -> None:
    """Its network is what is wanted, labels or not."""
    clients, path = made_clients(count=1), tmp_path / "relay.safetensors"
    first = RelayServer(mlp(9, torch.float64), checkpoint=path)
    first.collect([clients[0].answer(first.broadcast())])
    second = RelayServer(mlp(8, torch.float64))
    second.resume(path)
    same(play(second, clients), made(mlp, 0, torch.float64).state_dict(), 1e-6)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "relay.safetensors"
    play(RelayServer(mlp(dtype=torch.float64), checkpoint=path), made_clients())
    wider = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 5))
    for other, said in ((resnet(), "got '0', which it does not have"), (wider, "'2.bias' (7,)")):
        server = RelayServer(other)
        before = {key: t.clone() for key, t in server._merged.network.state_dict().items()}
        with refused(str(path), "must be the checkpoint of a relay of this network", said):
            server.resume(path)
        same(server._merged.network.state_dict(), before)
        assert server.broadcast().tensors().keys() == {"round", "open"}
    mlp_upload = maecho.make_upload(mlp(), batches(), "ann")
    mlp_upload.save(tmp_path / "ann.safetensors")
    with refused("must be a maecho relay, got a maecho upload"):
        RelayServer(mlp()).resume(tmp_path / "ann.safetensors")
    with refused("must be a file, got nothing at that place"):
        RelayServer(mlp()).resume(tmp_path / "none")
