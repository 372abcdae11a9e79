"""Random networks whose neurons lie on any axis: every space that is found holds, in float64 to 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from maecho.network.spaces import verify
from maecho.network.tracing import derive, proven
from support.clients import rng
from support.odd_networks import Mean, Swap


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Side(nn.Module):
    """Two layers side by side on one axis, or on the channels."""

    def __init__(self, one: nn.Module, two: nn.Module, axis: int):
        super().__init__()
        self.one, self.two, self.axis = one, two, axis

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], self.axis)


def convolution(x: Tensor, width: int, **options: Any) -> nn.Module:
    of = {3: nn.Conv1d, 4: nn.Conv2d}[x.dim()]
    return of(x.shape[1], width, 3, padding=1, **options)


def choices(x: Tensor, width: int) -> list[nn.Module]:
    """Layers that take x."""
    features, channels = x.shape[-1], x.shape[1]
    found: list[nn.Module] = [
        nn.Linear(features, width), nn.Linear(features, features), nn.ReLU(), nn.LayerNorm(features),
        Residual(nn.Linear(features, features)), Residual(nn.Sequential(nn.Linear(features, width), nn.ReLU(),
                                                                       nn.Linear(width, features))),
    ]  # fmt: skip
    if x.dim() == 2:
        return [*found, nn.BatchNorm1d(features)]
    norm = nn.BatchNorm1d if x.dim() == 3 else nn.BatchNorm2d
    pool = nn.AvgPool1d if x.dim() == 3 else nn.MaxPool2d
    found += [
        convolution(x, width), convolution(x, channels, groups=channels), norm(channels), pool(3, 1, 1),
        nn.Sequential(convolution(x, width), norm(width), nn.ReLU()), Residual(convolution(x, channels)),
        nn.GroupNorm(1, channels), nn.GroupNorm(channels, channels), nn.LayerNorm(tuple(x.shape[1:])),
        nn.Flatten(), nn.Flatten(1, 2), nn.Flatten(2), Mean(1), Mean(2), Swap(),
        Side(convolution(x, channels), convolution(x, width), 1),
    ]  # fmt: skip
    if channels % 2 == 0:
        found.append(nn.GroupNorm(2, channels))
    return found


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_space_holds(data: st.DataObject) -> None:
    sizes = st.integers(2, 4)
    seed = data.draw(st.integers(0, 1000))
    embedding = data.draw(st.booleans())
    shape = [3, *data.draw(st.lists(sizes, min_size=1, max_size=2 if embedding else 3))]
    x = torch.randint(0, 5, shape, generator=rng(seed)) if embedding else torch.randn(shape, generator=rng(seed))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Embedding(5, data.draw(sizes))] if embedding else []
        z = nn.Sequential(*layers)(x)
        for _ in range(data.draw(st.integers(2, 6))):
            layer = data.draw(st.sampled_from(choices(z, data.draw(sizes))))
            layers.append(layer)
            z = layer(z)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(z[0].numel(), 3)).double()
        for module in model.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.uniform_(0.2, 1).sub_(0.0 if isinstance(module, nn.modules.batchnorm._NormBase) else 0.6)
    x = x.double() if x.is_floating_point() else x
    spaces = derive(model.eval(), x)
    verify(model, spaces, x, tolerance=1e-9)
    assert proven(model, x) == (spaces, {})


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(2, 5), st.booleans(), st.booleans()), min_size=1, max_size=4), st.booleans())
def test_ordinary_convolutional_networks_keep_all_their_spaces(
    blocks: list[tuple[int, bool, bool]], mean: bool
) -> None:
    layers: list[nn.Module] = []
    inputs = 2
    for width, norm, residual in blocks:
        layers += [nn.Conv2d(inputs, width, 3, padding=1), *[nn.BatchNorm2d(width)] * norm, nn.ReLU()]
        layers += [Residual(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()))] * residual
        inputs = width
    last: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if mean else [nn.Flatten()]
    layers += [*last, nn.Linear(inputs if mean else inputs * 16, 6), nn.ReLU(), nn.Linear(6, 3)]
    x = torch.randn(3, 2, 4, 4, generator=rng())
    found = derive(nn.Sequential(*layers).eval(), x)
    assert [space.size for space in found] == [*(width for width, _, _ in blocks), 6]


@pytest.mark.parametrize("width", [1, 3])
def test_mlps_on_tokens_keep_their_hidden_neurons(width: int) -> None:
    x = torch.randn(3, 5, 4, generator=rng())
    model = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4), Mean(1),
                          nn.Linear(4, 2))  # fmt: skip
    assert [space.size for space in derive(model, x)] == [width, 4]
