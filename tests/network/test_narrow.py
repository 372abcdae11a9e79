"""Finding the layer at which a network is narrow: all that comes later depends on its inputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho.network import layers
from maecho.network.narrow import narrow
from support.clients import Net, network, rng


def seen(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The inputs of each layer, in order of execution."""
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda m, a, k=layer.name: found.setdefault(k, a[0]))
        for name, layer in layers.read(model).layers.items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def narrow_of(model: nn.Module, x: Tensor) -> str | None:
    return narrow(model, layers.read(model), x, seen(model, x))


def around() -> nn.Module:
    """A network with a shortcut past the first two layers."""
    parts = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 3)}
    return Net(lambda net, x: net.c((x + net.b(net.a(x).relu())).relu()), **parts)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 2)
    )


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (network, (12,), "2"),
        (cnn, (1, 6, 6), "4"),
        (around, (6,), "c"),
        (lambda: nn.Linear(4, 2), (4,), None),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 2), nn.Flatten()), (1, 4, 4), None),
    ],
    ids=["mlp", "cnn", "a way around", "one layer", "convolutions alone"],
)
def test_the_first_fully_connected_layer_that_nothing_goes_around(make: Any, shape: Any, expected: str | None) -> None:
    assert narrow_of(make(), torch.randn(4, *shape, generator=rng())) == expected
