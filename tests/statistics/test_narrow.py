"""Finding the layer at which a network is narrow: all that comes later depends on its inputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import make_upload
from maecho.network import layers
from maecho.statistics.features import narrow
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


class Demanding(nn.Module):
    """It keeps a running maximum, asserts that inputs are finite, and makes indices of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(5, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("highest", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        assert x.isfinite().all(), "inputs must be finite"
        self.highest = torch.maximum(self.highest, x.max())
        return self.b(self.a(self.table(x[:, 0].abs().long() % 5) + x).relu())


def test_a_model_is_never_run_on_inputs_that_it_cannot_take() -> None:
    """It was run on NaN: the buffer was NaN afterwards, and the assertion ended the upload."""
    model = Demanding()
    x = torch.randn(8, 6, generator=rng(3))
    assert narrow_of(model, x) == "a"
    assert float(model.highest) == float(x.max())
    upload = make_upload(model, [(x, torch.arange(8) % 3)], "ann")
    assert list(upload.statistics["features"]) == ["a"]
    assert float(model.highest) == float(x.max())


def test_a_dependency_that_nan_to_num_hides() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.c(net.a(x).relu()) + x.nan_to_num()[:, :3]

    model = Net(forward, a=nn.Linear(6, 6), c=nn.Linear(6, 3))
    assert narrow_of(model, torch.randn(4, 6, generator=rng(4))) is None


def test_a_single_example_and_equal_ones() -> None:
    for x in (torch.randn(1, 6, generator=rng(5)), torch.ones(5, 6)):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        assert narrow_of(model, x) == "2"
        assert narrow_of(around(), x) == "c"
