"""A network of layers whose weights are stored or multiplied in an unusual way, and clients that have it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers.pytorch_utils import Conv1D

import maecho
from maecho.network import kinds
from maecho.statistics import STATISTICS
from support.clients import batches
from support.networks import with_running_statistics


class Turned(nn.Module):
    """y = x W + b with W stored [in, out]. A user registers it."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 3), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TurnedKind(kinds.Kind):
    transposed = True


kinds.register(Turned, TurnedKind())


class Unusual(nn.Module):
    """12 inputs, 5 classes. A weight stored [in, out] is in it as a built-in kind, and as one that a user registers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.each = nn.ConvTranspose1d(4, 4, 2, groups=4)
        self.grouped = nn.ConvTranspose1d(4, 6, 3, dilation=2, padding=2, groups=2, bias=False)
        self.deep = nn.Conv3d(6, 4, (3, 1, 1))
        self.one, self.two = Conv1D(8, 28), Turned(8, 6)
        self.pair = nn.Bilinear(6, 3, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = gelu(self.norm(self.up(x.reshape(-1, 3, 4))))
        h = gelu(self.grouped(gelu(self.each(h))))
        h = gelu(self.deep(h[..., None, None])).flatten(1)
        h = gelu(self.two(gelu(self.one(h))))
        return self.head(gelu(self.pair(h, h[:, :3])))


LAYERS = ("up", "each", "grouped", "deep", "one", "two", "pair", "head")


def unusual(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Unusual()
        for layer in (model.one, model.two):
            layer.weight.data.mul_(3)
        return with_running_statistics(model, batches(seed)[0][0]).to(dtype)


def unusual_clients(count: int = 3, dtype: torch.dtype = torch.float32, same: bool = False) -> list[maecho.Upload]:
    return [
        maecho.make_upload(unusual(0 if same else i, dtype), batches(i, 3 + i, dtype=dtype), f"client-{i}", STATISTICS)
        for i in range(count)
    ]
