"""A server goes on from another server's checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import maecho
from maecho import InputError, RelayClient, RelayServer, UploadError
from maecho.echo.simulated import Drawing
from maecho.errors import LONGEST
from maecho.upload.storage import read_about, write_tensors
from support import mutations
from support.clients import batches, rng
from support.clients import network as mlp
from support.relays import (
    play,
    random_network,
    relay_clients,
    resnet,
    same,
)
from support.tiny import refused_input

VERSION_1 = Path(__file__).parent.parent / "upload" / "version_1"


@pytest.mark.parametrize("done", [1, 2])
def test_another_server_goes_on_from_the_file(kind: Any, done: int, tmp_path: Path) -> None:
    clients, path = relay_clients(kind), tmp_path / "relay.safetensors"
    first = RelayServer(random_network(kind[0], 9, torch.float64), checkpoint=path)
    for _ in range(done):
        if not first.done:
            question = first.broadcast()
            first.collect([c.answer(question) for c in clients])
    second = RelayServer(random_network(kind[0], 8, torch.float64))
    second.resume(path)
    assert second.clients_answered == first.clients_answered
    assert second.stages == first.stages
    same(play(second, clients), play(first, clients))


def test_a_single_client_is_still_one_after_the_file(tmp_path: Path) -> None:
    """With a single client the answer is its own network, with labels or without."""
    clients, path = relay_clients(count=1), tmp_path / "relay.safetensors"
    first = RelayServer(mlp(9, torch.float64), checkpoint=path)
    first.collect([clients[0].answer(first.broadcast())])
    second = RelayServer(mlp(8, torch.float64))
    second.resume(path)
    same(play(second, clients), random_network(mlp, 0, torch.float64).state_dict(), 1e-6)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "relay.safetensors"
    play(RelayServer(mlp(dtype=torch.float64), checkpoint=path), relay_clients())
    wider = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 5))
    for other, said in ((resnet(), "got '0', which it does not have"), (wider, "'2.bias' (7,)")):
        server = RelayServer(other)
        before = {key: t.clone() for key, t in server._merged.network.state_dict().items()}
        with refused_input(str(path), "must be the checkpoint of a relay of this network", said):
            server.resume(path)
        same(server._merged.network.state_dict(), before)
        assert server.broadcast().tensors().keys() == {"round", "open"}
    mlp_upload = maecho.make_upload(mlp(), batches(), "ann")
    mlp_upload.save(tmp_path / "ann.safetensors")
    with refused_input("must be a maecho relay, got a maecho upload"):
        RelayServer(mlp()).resume(tmp_path / "ann.safetensors")
    with refused_input("must be a file, got nothing at that place"):
        RelayServer(mlp()).resume(tmp_path / "none")


def test_it_says_which_stages_came_from_a_start(tmp_path: Path) -> None:
    path = tmp_path / "relay.safetensors"
    pairs = [(mlp(seed), batches(seed)) for seed in (1, 2)]
    sent = [maecho.make_upload(m, b, f"client {i}", rank=None) for i, (m, b) in enumerate(pairs)]
    chain = maecho.aggregate(sent, "echo-chain", model=mlp(), draws=300)
    options: dict[str, Any] = {"rounds": 3, "uploads": sent, "drawing": Drawing(300)}
    clients = [RelayClient(*pair) for pair in pairs]
    first = RelayServer(mlp(), start=chain, checkpoint=path, **options)
    first.collect([client.answer(first.broadcast()) for client in clients])
    second = RelayServer(mlp(), **options)
    second.resume(path)
    assert [stage["inputs"] for stage in play(second, clients).recipe["rounds"]] == ["start", "real", "real"]
    same(second.result(), play(first, clients))
    assert second.result().recipe["rounds"] == first.result().recipe["rounds"]


def test_a_file_of_version_1_is_gone_on_from() -> None:
    """A checkpoint of maecho 0.1.0: a network of two layers, of which the first is merged."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    path = VERSION_1 / "relay.safetensors"
    server = RelayServer(model)
    server.resume(path)
    assert server.stages == [["0"], ["2"]]
    assert (server.clients_answered, server.answer_bytes) == ([2], [784])
    question = server.broadcast()
    assert (question.round, dict(question.units), question.head) == (1, {"2": None}, "2")
    held = load_file(path)
    same(dict(question.weights), {name: held[name] for name in ("0.weight", "0.bias")})
    x = torch.randn(20, 5, generator=rng())
    merged = play(server, [RelayClient(model, [(x, torch.arange(20) % 3)])])
    assert torch.equal(merged["0.weight"], held["0.weight"])
    assert not torch.equal(merged["2.weight"], held["2.weight"])
    assert merged.recipe["rounds"][0] == {"layers": ["0"], "inputs": "real", "clients": 2, "bytes": 784}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finished": 9}, "9 of 2 stages are finished, of 1 it tells"),
        ({"from_start": 2}, "1 of 2 stages are finished"),
        ({"stages": [["0"], ["7"]]}, "got '7', which it does not have"),
        ({"settled": ["0.weight", "7.weight"]}, "'7.weight'"),
        ({"joins": None}, "`$.joins`"),
        ({"joins": {"7": "1"}}, "'7', which is a layer of no stage"),
        ({"head": "7"}, "'7', which is a layer of no stage"),
        ({"head": 7}, "`$.head`"),
        ({"stages": [["0"], ["2", "0"]]}, "a layer in two stages"),
        ({"stages": "02"}, "`$.stages`"),
        ({"heard": [True]}, "`$.heard[0]`"),
        ({"heard": [-1]}, "a negative number of clients or of bytes"),
        ({"bytes": [2, 3]}, "1 of 2 stages are finished, of 1 it tells"),
        ({"alone": 1}, "`$.alone`"),
        ({"from_start": -1}, "-1 came from a start"),
    ],
)
def test_a_file_that_contradicts_itself(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = VERSION_1 / "relay.safetensors"
    about = {key: value for key, value in read_about(source, "relay").items() if key not in ("kind", "version")}
    write_tensors(tmp_path / "relay.safetensors", "relay", load_file(source), {**about, **changes})
    with refused_input("must be the checkpoint of a relay of this network", said):
        RelayServer(small()).resume(tmp_path / "relay.safetensors")


def small() -> nn.Sequential:
    """A network of the architecture of the checkpoint of maecho 0.1.0."""
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite(value: float, tmp_path: Path) -> None:
    source = VERSION_1 / "relay.safetensors"
    about = {key: said for key, said in read_about(source, "relay").items() if key not in ("kind", "version")}
    tensors = load_file(source)
    tensors["0.bias"][2] = value
    write_tensors(tmp_path / "relay", "relay", tensors, about)
    with refused_input("must be the checkpoint of a relay of this network", "NaN or infinity in '0.bias'"):
        RelayServer(small()).resume(tmp_path / "relay")


def test_a_damaged_checkpoint_ends_in_one_sentence(tmp_path: Path) -> None:
    """Nothing but InputError is raised, whatever is in the file, and flipped bits are found."""
    rng = random.Random(0)
    source = VERSION_1 / "relay.safetensors"
    about = {key: said for key, said in read_about(source, "relay").items() if key not in ("kind", "version")}
    write_tensors(tmp_path / "new", "relay", load_file(source), about)
    sources, accepted = [(tmp_path / "new").read_bytes(), source.read_bytes()], 0
    for index in range(400):
        case = mutations.draw(rng, sources) if index < 300 else mutations.flip(rng, sources[0])
        case.write(tmp_path / "bad")
        found = None
        try:
            RelayServer(small()).resume(tmp_path / "bad")
        except InputError as error:
            found = error
        assert found is not None or not case.must_fail, f"{index}, {case.kind}"
        assert not isinstance(found, UploadError)
        assert len(str(found)) <= LONGEST
        assert str(found).isprintable()
        accepted += found is None
    assert accepted > 10, "damage that does no harm shows that the checks behind the digest are reached"
