"""Random networks of two to six layers of every known kind, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from support.clients import rng
from support.odd_networks import Mean, Swap

CLASSES = 3


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


class Turned(nn.Module):
    """A layer along the channels, between two transposes."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, -1)).transpose(1, -1)


def convolution(x: Tensor, width: int, **options: Any) -> nn.Module:
    of = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[x.dim()]
    return of(x.shape[1], width, 3, padding=1, **options)


def choices(x: Tensor, width: int) -> list[nn.Module]:
    """Layers that take x."""
    features, channels = x.shape[-1], x.shape[1]
    found: list[nn.Module] = [
        nn.Linear(features, width), nn.Linear(features, features, bias=False), nn.ReLU(), nn.PReLU(), nn.Tanh(),
        nn.LayerNorm(features), nn.RMSNorm(features),
        Residual(nn.Linear(features, features)), Residual(nn.Sequential(nn.Linear(features, width), nn.ReLU(),
                                                                       nn.Linear(width, features))),
    ]  # fmt: skip
    if x.dim() == 6:
        return [*found, nn.Flatten(), nn.Flatten(1, 2), Mean(1)]
    if x.dim() == 2:
        return [*found, nn.BatchNorm1d(features)]
    norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.dim()]
    pool = {3: nn.AvgPool1d, 4: nn.MaxPool2d, 5: nn.MaxPool3d}[x.dim()]
    found += [
        convolution(x, width), convolution(x, channels, groups=channels), norm(channels), pool(3, 1, 1),
        nn.Sequential(convolution(x, width), norm(width), nn.ReLU()), Residual(convolution(x, channels)),
        nn.GroupNorm(1, channels), nn.GroupNorm(channels, channels), nn.LayerNorm(tuple(x.shape[1:])),
        nn.Flatten(), nn.Flatten(1, 2), nn.Flatten(2), Mean(1), Mean(2), Swap(),
        Side(convolution(x, channels), convolution(x, width), 1), Side(nn.ReLU(), nn.Linear(features, width), -1),
        Turned(nn.Linear(channels, channels)),
    ]  # fmt: skip
    if channels % 2 == 0:
        found += [nn.GroupNorm(2, channels), convolution(x, 2 * width, groups=2), nn.Unflatten(1, (2, channels // 2))]
    return found


def drawn(data: st.DataObject, examples: int) -> tuple[nn.Module, Tensor]:
    """A network of layers that hypothesis chooses, in float64 with random weights, and inputs for it."""
    sizes = st.integers(2, 4)
    seed = data.draw(st.integers(0, 1000))
    embedding = data.draw(st.booleans())
    shape = [examples, *data.draw(st.lists(sizes, min_size=1, max_size=3 if embedding else 4))]
    x = torch.randint(0, 5, shape, generator=rng(seed)) if embedding else torch.randn(shape, generator=rng(seed))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Embedding(5, data.draw(sizes))] if embedding else []
        z = nn.Sequential(*layers)(x)
        for _ in range(data.draw(st.integers(2, 6))):
            layer = data.draw(st.sampled_from(choices(z, data.draw(sizes))))
            layers.append(layer)
            z = layer(z)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(z[0].numel(), CLASSES)).double()
        for module in model.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.uniform_(0.2, 1).sub_(0.0 if isinstance(module, nn.modules.batchnorm._NormBase) else 0.6)
    return model.eval(), x.double() if x.is_floating_point() else x
