"""Fixtures: clients of two classes each, and a server's round made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from maecho.rounds import Local, Round
from maecho.rounds.servers import Returned
from support.clients import rng
from support.federations import CLASSES, Clients, clouds, network


@pytest.fixture
def clients() -> Clients:
    return [clouds(20 + 3 * i, (i % CLASSES, (i + 1) % CLASSES), i) for i in range(6)]


@pytest.fixture
def test_data() -> tuple[Tensor, Tensor]:
    return clouds(200, tuple(range(CLASSES)), 77)


@pytest.fixture
def make_round() -> Callable[..., Round]:
    """A round in which clients of these sizes return what a random network is after a small random change."""

    def make(
        sizes: tuple[int, ...] = (30, 50), local: Local | None = None, number: int = 1, **changes: object
    ) -> Round:
        model = network()
        weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
        returned = []
        for i, size in enumerate(sizes):
            draw = rng(10 * number + i)
            moved = {name: t + 0.1 * torch.randn(t.shape, generator=draw) for name, t in weights.items()}
            returned.append(Returned(i, moved, *clouds(size, (0, 1, 2, 3), i)))
        names = frozenset(name for name, _ in model.named_parameters())
        given = {"number": number, "weights": weights, "returned": returned, "local": local or Local()}
        return Round(**{**given, "clients": 10, "trained": names, "network": model, **changes})  # type: ignore[arg-type]

    return make
