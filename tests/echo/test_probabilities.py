"""The merged model's probabilities: as sure as the clients, and those of one model that several clients share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho import RelayClient, RelayServer, make_upload, relay
from maecho.echo.fit import Regression
from maecho.lab import data, networks
from maecho.lab.training import LocalTraining
from support.clients import rng

DIGITS = data.digits()
TEST = data.batches(DIGITS.x_test, DIGITS.y_test, 500)
METHODS = ("echo-chain", "echo-relay")


def trained(x: Tensor, y: Tensor, epochs: int = 20) -> nn.Module:
    model = networks.build("digits-mlp", rng(0))
    LocalTraining(epochs=epochs, learning_rate=0.1)(model, x, y, rng(1))
    return model


def pairs_of(*held: tuple[int, ...], shared: nn.Module | None = None) -> list[tuple[nn.Module, Any]]:
    """Clients of these classes. Each has trained a model of its own, unless they share one."""
    pairs = []
    for classes in held:
        own = torch.isin(DIGITS.y_train, torch.tensor(classes))
        x, y = DIGITS.x_train[own], DIGITS.y_train[own]
        pairs.append((trained(x, y) if shared is None else copy.deepcopy(shared), data.batches(x, y, 500)))
    return pairs


def merged(method: str, pairs: list[tuple[nn.Module, Any]]) -> nn.Module:
    model = networks.build("digits-mlp", rng(9))
    uploads = [make_upload(m, b, f"{i}", ["moments", "features"], rank=None) for i, (m, b) in enumerate(pairs)]
    chain = lambda: maecho.aggregate(uploads, "echo-chain", model=model, draws=4000)  # noqa: E731
    model.load_state_dict(relay(model, pairs) if method == "echo-relay" else chain())
    return model.eval()


def probabilities(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x) for x, _ in TEST]).softmax(1)


@pytest.mark.parametrize("method", METHODS)
def test_a_merged_model_is_as_sure_as_it_is_right(method: str) -> None:
    """Scores of 0 and 1 would give the right class of ten a probability of 0.23 at the most."""
    model = merged(method, pairs_of((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9)))
    found = maecho.evaluate(model, TEST)
    assert found.accuracy > 0.9
    assert float(probabilities(model).amax(1).mean()) > 0.8
    assert found.calibration_error < 0.1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("held", [((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)), (tuple(range(10)), tuple(range(10)))], ids=str)
def test_twins_give_their_model_back(method: str, held: tuple[tuple[int, ...], ...]) -> None:
    """Clients with one model and data of their own. The model is not a perfect one."""
    own = trained(DIGITS.x_train[::4], DIGITS.y_train[::4], epochs=10)
    model = merged(method, pairs_of(*held, shared=own))
    before, after = maecho.evaluate(own, TEST).accuracy, maecho.evaluate(model, TEST).accuracy
    assert before < 0.96
    assert after >= before - 0.005
    torch.testing.assert_close(probabilities(model), probabilities(own), rtol=0, atol=1e-3)


def test_twins_are_known_whatever_the_ridge_pulls_to() -> None:
    own, other = trained(DIGITS.x_train[::4], DIGITS.y_train[::4]), networks.build("digits-mlp", rng(5))
    pairs = pairs_of((0, 1, 2, 3, 4), (5, 6, 7, 8, 9), shared=own)
    model = copy.deepcopy(own)
    model.load_state_dict(relay(own, pairs, prior=other.state_dict(), regression=Regression(ridge=1e-7)))
    torch.testing.assert_close(probabilities(model), probabilities(own), rtol=0, atol=0.02)


def test_answers_without_squares_are_read_and_give_the_same_classes() -> None:
    """Older clients do not send Σ ‖z‖². Their scores come back a little smaller."""
    pairs = pairs_of((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    models = []
    for left_out in ("squares", "nothing"):
        server = RelayServer(networks.build("digits-mlp", rng(9)))
        clients = [RelayClient(*pair) for pair in pairs]
        while not server.done:
            answers = [client.answer(server.broadcast()).tensors() for client in clients]
            server.collect({k: t for k, t in one.items() if not k.endswith(left_out)} for one in answers)
        models.append(networks.build("digits-mlp", rng(9)))
        models[-1].load_state_dict(server.result())
    old, new = map(probabilities, models)
    assert torch.equal(old.argmax(1), new.argmax(1))
    assert 0.7 < float(old.amax(1).mean()) < float(new.amax(1).mean())
