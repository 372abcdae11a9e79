"""Compares methods on whole uploads and on uploads that are cut: what does the cut cost?

Two clients train on scikit-learn's digits, from the same weights. For the residual networks with normalisation they
have halves of the data; for the MLP one has the digits 0 to 4 and the other 5 to 9. The uploads are made once for every
rank that is named. A number is an accuracy on test images, in percent. The row of a rank also says how large one
client's tensors are: times its weights, and times what cannot be cut. The table has the means over the seeds.

    python benchmarks/cut_settings.py                            # four networks, three seeds
    python benchmarks/cut_settings.py --networks batch --seeds 0 --ranks 2x 4x
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from maecho import Upload, aggregate, evaluate, make_upload
from maecho.aggregation.afl import AFL
from maecho.aggregation.kronecker import Kronecker
from maecho.aggregation.ma_echo import MAEcho
from maecho.aggregation.regmean import RegMean

Norm = Callable[[int, int], nn.Module]
"""Channels, and points along a side of the image -> a layer."""

NORMS: Mapping[str, Norm] = {
    "batch": lambda channels, side: nn.BatchNorm2d(channels),
    "group": lambda channels, side: nn.GroupNorm(4, channels),
    "layer": lambda channels, side: nn.LayerNorm([channels, side, side]),
}
METHODS: Mapping[str, Any] = {
    "average": "fedavg",
    "RegMean": RegMean(),
    "RegMean, no ridge": RegMean(ridge=0),
    "Kronecker": Kronecker(),
    "MA-Echo": MAEcho(),
    "MA-Echo, printed": MAEcho(form="printed"),
    "MA-Echo, limit": MAEcho(form="printed", solver="limit"),
    "AFL": AFL(backbone="average"),
}
STATISTICS = ["gram", "projector", "classes", "moments", "features"]
"""What is sent by default."""
MORE = {"Kronecker": ["gram", "gradients"], "AFL": ["gram", "targets"]}
"""What is sent for methods that need something else."""
TRAINED = 1200


class Block(nn.Module):
    """Two convolutions with normalisation, and a sum around them."""

    def __init__(self, width: int, out: int, stride: int, side: int, norm: Norm) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm_one = norm(out, side)
        self.two = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_two = norm(out, side)
        self.around = nn.Conv2d(width, out, 1, stride, bias=False)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_two(self.two(self.act(self.norm_one(self.one(x)))))
        out: Tensor = self.act(y + self.around(x))
        return out


def resnet(norm: Norm) -> nn.Module:
    """A residual network for images of 8 by 8 points."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        norm(16, 8),
        nn.ReLU(),
        Block(16, 16, 1, 8, norm),
        Block(16, 32, 2, 4, norm),
        Block(32, 64, 2, 2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def mlp() -> nn.Module:
    """Three fully connected layers."""
    sizes = nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)
    return nn.Sequential(nn.Flatten(), *sizes)


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {name: partial(resnet, norm) for name, norm in NORMS.items()} | {
    "mlp": mlp
}


def batches(
    x: Tensor, y: Tensor, size: int, generator: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The examples in batches, in random order if there is a generator."""
    order = torch.arange(len(x)) if generator is None else torch.randperm(len(x), generator=generator)
    for chosen in order.split(size):
        yield x[chosen], y[chosen]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    """Train a client's model in place."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    model.train()
    for _ in range(epochs):
        for inputs, labels in batches(x, y, 64, generator):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model.eval()


def uncut(upload: Upload) -> int:
    """The size of what cannot be cut of what is sent by default: weights, counts and class means."""
    parts = ("classes", "counts", "means", "covariances/ranks", "unit")
    kept = [t for key, t in upload.tensors().items() if key.startswith("weights/") or key.endswith(parts)]
    return sum(tensor.nbytes for tensor in kept)


def measure(network: str, seed: int, ranks: list[str | None]) -> list[list[float]]:
    """Print the rows of one network and seed, and return their accuracies: for each rank one of each method."""
    images, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(targets)[order]
    test = [(x[TRAINED:], y[TRAINED:])]
    first = y[:TRAINED] < 5 if network == "mlp" else torch.arange(TRAINED) < TRAINED // 2
    data = [(x[:TRAINED][part], y[:TRAINED][part]) for part in (first, ~first)]
    torch.manual_seed(seed)
    start = NETWORKS[network]()
    models = []
    for client, (inputs, labels) in enumerate(data):
        model = NETWORKS[network]()
        model.load_state_dict(start.state_dict())
        models.append(train(model, inputs, labels, 10 if network == "mlp" else 6, 10 * seed + client))
    own = ", ".join(f"{100 * evaluate(model, test).accuracy:.1f}" for model in models)
    print(f"{network}, seed {seed}: clients {own}")
    rows = []
    for rank in ranks:

        def made(statistics: list[str], rank: str | None = rank) -> list[Upload]:
            pairs = zip(models, data, strict=True)
            return [make_upload(m, list(batches(*d, 64)), f"{i}", statistics, rank) for i, (m, d) in enumerate(pairs)]

        usual = made(STATISTICS)
        found: list[float] = []
        for name, method in METHODS.items():
            merged = NETWORKS[network]()
            merged.load_state_dict(aggregate(made(MORE[name]) if name in MORE else usual, method))
            found.append(100 * evaluate(merged.eval(), test).accuracy)
        named = [f"{name} {accuracy:.1f}" for name, accuracy in zip(METHODS, found, strict=True)]
        of_weights, of_uncut = usual[0].bytes() / usual[0].bytes([]), usual[0].bytes() / uncut(usual[0])
        print(f"  {rank or 'whole'} ({of_weights:.2f}, {of_uncut:.2f}): {', '.join(named)}", flush=True)
        rows.append(found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", nargs="+", default=["whole", "4x"], help='"whole", or a rank of make_upload')
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")  # clients of some digits lack inputs at some layers
    ranks = [None if rank == "whole" else rank for rank in chosen.ranks]
    lines = ["| network, rank |" + "".join(f" {name} |" for name in METHODS), "|---" * (1 + len(METHODS)) + "|"]
    for network in chosen.networks:
        of_seeds = [measure(network, seed, ranks) for seed in chosen.seeds]
        for rank, rows in zip(chosen.ranks, zip(*of_seeds, strict=True), strict=True):
            means = "".join(f" {fmean(column):.1f} |" for column in zip(*rows, strict=True))
            lines.append(f"| {network}, {rank} |{means}")
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
