"""Networks whose neurons can be permuted, and uploads of permuted copies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import maecho
from maecho.lab.networks import mlp
from maecho.network.spaces import permute
from maecho.network.tracing import derive
from support.clients import rng


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Identity() if stride == 1 and inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm_one(self.one(x)))
        return torch.relu(self.norm_two(self.two(h)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.blocks = nn.Sequential(Block(6, 6), Block(6, 10, 2), Block(10, 10))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(12 * 4, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5),
    )  # fmt: skip


def with_running_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    """Run the model once in training mode, so that its running statistics are not those of a fresh network."""
    model.train()
    with torch.no_grad():
        model(x)
    return model.eval()


NETWORKS = {
    "mlp": (lambda: mlp((12, 9, 7, 5), bias=True), (4, 12)),
    "cnn": (cnn, (4, 3, 8, 8)),
    "resnet": (ResNet, (4, 3, 8, 8)),
}


def permuted_copies(name: str, count: int = 3) -> tuple[nn.Module, torch.Tensor, list[maecho.Upload]]:
    """A network, inputs, and uploads of copies whose neurons are in other orders."""
    make, shape = NETWORKS[name]
    x = torch.randn((12, *shape[1:]), generator=rng())
    model = with_running_statistics(make(), x)
    spaces, uploads = derive(model, x), []
    for i in range(count):
        orders = {s.name: torch.randperm(s.size, generator=rng(i)) for s in spaces} if i else {}
        other = make().eval()
        other.load_state_dict(permute(model.state_dict(), spaces, orders))
        uploads.append(maecho.make_upload(other, [(x[i:], torch.arange(12 - i) % 5)], f"client-{i}", rank=None))
    return model, x, uploads
