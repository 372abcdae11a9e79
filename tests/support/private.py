"""Networks, and the sums that privacy bounds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maecho import Privacy
from maecho.echo.observation import observe
from maecho.echo.totals import UnitSums
from maecho.network.packed.twin import twin_of
from maecho.network.stages import plan
from support.tiny import network


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Text(nn.Module):
    """A network from tokens to classes: an embedding, a norm, layers over a sequence, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.each = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.words(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.relu(self.each(h)).mean(1))


def picture() -> nn.Module:
    """A network with patches, groups, BatchNorms with and without a layer, a GroupNorm, a head without bias."""
    return nn.Sequential(
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 4, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(16, 3, bias=False),
    )


def case(kind: str, seed: int, n: int = 9, scale: float = 1.0) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A client's network, a merged one, and data."""
    draw = rng(seed)
    models = []
    for _ in range(2):
        model = {"linear": network, "picture": picture, "text": Text}[kind]().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=draw))
        models.append(twin_of(model).network)
    shape = {"linear": (n, 4), "picture": (n, 2, 6, 6), "text": (n, 5)}[kind]
    x = torch.randint(0, 7, shape, generator=draw) if kind == "text" else scale * torch.randn(shape, generator=draw)
    return models[0], models[1], x, torch.randint(0, 3, (n,), generator=draw)


def by_name(sums: UnitSums) -> dict[str, Tensor]:
    """Every sum of one unit, by the name that privacy bounds it under."""
    found = {"gram": sums.gram, "cross": sums.cross}
    if sums.by_class is not None:
        found |= {"labels": sums.by_class.labels, "counts": sums.by_class.counts}
        assert sums.by_class.outputs is not None
        found["outputs"] = sums.by_class.outputs
    return found


def clipped_sums(privacy: Privacy, own: nn.Module, merged: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """All sums of all stages, before noise."""
    found = plan(own, x)
    out: dict[str, Tensor] = {}
    for stage in found.stages:
        if not stage:
            continue
        layers, parts = {unit.name for unit in stage}, [(x[:4], y[:4]), (x[4:], y[4:])]
        seen = observe(own, merged, stage, parts, "c", layers_with_labels=layers, classes=3, limit=privacy.factor)
        out |= {f"{name}/{part}": t for name, sums in seen.units.items() for part, t in by_name(sums).items()}
    return out
