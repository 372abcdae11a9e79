"""The paper's networks by name: small, without biases, every layer a named child."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from maecho.randomness import global_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def mlp(sizes: Sequence[int] = (784, 400, 200, 100, 10), bias: bool = False) -> nn.Sequential:
    """Fully connected layers fc1, fc2, ... with ReLU between; inputs of any shape are flattened first."""
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"mlp: sizes must be two or more positive widths, got {tuple(sizes)}")
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), **_fully_connected(sizes, bias)))


def cnn() -> nn.Sequential:
    """The CIFAR-10 network: convolutions c1, c2, c3 on 32x32 images, each halved by pooling, then fc1, fc2, fc3.

    Kernels lie in memory with channels last, and so do their outputs: pooling is then much faster on a CPU.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k, (inputs, outputs) in enumerate(pairwise((3, 64, 128, 256)), start=1):
        layers[f"c{k}"] = nn.Conv2d(inputs, outputs, kernel_size=3, stride=1, padding=1, bias=False)
        layers[f"c{k}_relu"] = nn.ReLU()
        layers[f"c{k}_dropout"] = nn.Dropout(0.2)
        layers[f"c{k}_pool"] = nn.MaxPool2d(2)
    head = _fully_connected((256 * 4 * 4, 1000, 500, 10), bias=False)
    for layer in head.values():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    network = nn.Sequential(OrderedDict(**layers, flatten=nn.Flatten(), **head))
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def digits_mlp() -> nn.Sequential:
    """An MLP for 8x8 digits, for the demo and for quick runs."""
    return mlp((64, 100, 50, 10))


def digits_linear() -> nn.Sequential:
    """A single layer for 8x8 digits."""
    return mlp((64, 10))


def cifar100_head() -> nn.Sequential:
    """Two fully connected layers on MobileNetV2's 1,280 features, for the 100 classes of CIFAR-100."""
    return mlp((1280, 512, 100))


def cifar100_linear() -> nn.Sequential:
    """A single layer on the same features."""
    return mlp((1280, 100))


def pacs_head() -> nn.Sequential:
    """Two fully connected layers on MobileNetV2's 1,280 features, for the 7 classes of PACS."""
    return mlp((1280, 512, 7))


def pacs_linear() -> nn.Sequential:
    """A single layer on the same features."""
    return mlp((1280, 7))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "cifar100-head": cifar100_head,
    "cifar100-linear": cifar100_linear,
    "pacs-head": pacs_head,
    "pacs-linear": pacs_linear,
    "digits-mlp": digits_mlp,
    "digits-linear": digits_linear,
}


def build(name: str, rng: torch.Generator) -> nn.Module:
    """Make the network of that name on the CPU. `rng` alone decides its initial weights."""
    if name not in NETWORKS:
        raise ValueError(f"build: no network {name!r}, known are {', '.join(NETWORKS)}")
    seed = int(torch.randint(2**62, (), generator=rng))
    with global_seed(seed):
        return NETWORKS[name]()


def _fully_connected(sizes: Sequence[int], bias: bool) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    last = len(sizes) - 1
    for k, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        layers[f"fc{k}"] = nn.Linear(inputs, outputs, bias=bias)
        if k < last:
            layers[f"fc{k}_relu"] = nn.ReLU()
    return layers
