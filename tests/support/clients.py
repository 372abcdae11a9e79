"""Small clients, and the zoo of nasty matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import maecho
from maecho.statistics import STATISTICS


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    """A small MLP: 12 inputs, 5 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (
            nn.Linear(12, 9, bias=bias),
            nn.ReLU(),
            nn.Linear(9, 7, bias=bias),
            nn.ReLU(),
            nn.Linear(7, 5, bias=bias),
        )
        return nn.Sequential(*layers).to(dtype)


def batches(
    seed: int = 0, count: int = 4, size: int = 16, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    draw = rng(seed)
    return [
        (torch.randn(size, 12, generator=draw).to(dtype) + seed, torch.randint(0, 5, (size,), generator=draw))
        for _ in range(count)
    ]


def clients(count: int = 3, dtype: torch.dtype = torch.float32, **options: object) -> list[maecho.Upload]:
    """Uploads with every statistic. Each client has its own model and data."""
    options = {"statistics": STATISTICS, **options}
    return [
        maecho.make_upload(network(i, dtype), batches(i, 3 + i, dtype=dtype), f"client-{i}", **options)  # type: ignore[arg-type]
        for i in range(count)
    ]


def _zoo() -> dict[str, Tensor]:
    draw = rng(1)
    X = torch.randn(20, 6, generator=draw, dtype=torch.float64)
    thin = torch.randn(2, 6, generator=draw, dtype=torch.float64)
    return {
        "full": X.T @ X,
        "rank-deficient": thin.T @ thin,
        "zero": torch.zeros(6, 6, dtype=torch.float64),
        "huge": 1e12 * X.T @ X,
        "tiny": 1e-12 * X.T @ X,
        "one sample": torch.outer(X[0], X[0]),
        "identity": torch.eye(6, dtype=torch.float64),
        "constant inputs": torch.diag(torch.tensor([0, 0, 3.0, 1, 0, 1e-9], dtype=torch.float64)),
        "one by one": torch.tensor([[2.0]], dtype=torch.float64),
    }


ZOO = _zoo()


class Net(nn.Module):
    """A network of named parts. Its forward is the function given."""

    def __init__(self, forward: Any, **parts: Any):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)
