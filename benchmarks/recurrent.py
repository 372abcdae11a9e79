"""Compares what can be done with the matrices on hidden states when recurrent networks are merged, on training data
that no client saw. That echo-chain and echo-relay average them was decided with it.

A network reads the rows of an image one after the other. Clients are trained on five sixths of the training set; the
merged model is measured on the last sixth. The test set is not used.

    python benchmarks/recurrent.py      # scikit-learn's digits, three seeds
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from maecho import aggregate, evaluate, make_upload, relay
from maecho.lab import data, partition
from maecho.network import stages, units

KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
DRAWS = 3000
REFITTED = "hidden matrices refitted"


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self, kind: str, side: int, classes: int, width: int = 32):
        super().__init__()
        self.side = side
        self.recurrent = KINDS[kind](side, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrent(x.reshape(len(x), -1, self.side))[0][:, -1])
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--beta", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns: dict[str, dict[str, list[float]]] = {}
    for kind in options.kinds:
        for init in ("same", "different"):
            for seed in options.seeds:
                found = one(options.data, kind, options.clients, options.beta, options.steps, init, seed)
                for method, accuracy in found.items():
                    columns.setdefault(method, {}).setdefault(f"{kind}, {init}", []).append(accuracy)
    cells = list(next(iter(columns.values())))
    print(f"| | {' | '.join(cells)} |\n|---|{'---|' * len(cells)}")
    for method, row in columns.items():
        shown = (f"{statistics.fmean(v):.0f} ({min(v):.0f} to {max(v):.0f})" for v in row.values())
        print(f"| {method} | {' | '.join(shown)} |")


def one(name: str, kind: str, clients: int, beta: float, steps: int, init: str, seed: int) -> dict[str, float]:
    """The accuracy of each method on held-out training data, in per cent."""
    dataset = data.load(name)
    order = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 6], order[len(order) // 6 :]
    x, y = dataset.x_train[kept].flatten(1), dataset.y_train[kept]
    validation = data.batches(dataset.x_train[held].flatten(1), dataset.y_train[held], 1000)
    side = round(x.shape[1] ** 0.5)

    def network(number: int) -> Rows:
        with torch.random.fork_rng():
            torch.manual_seed(number)
            return Rows(kind, side, dataset.classes)

    shared = network(seed)
    pairs = []
    for i, part in enumerate(partition.dirichlet(y.numpy(), clients, beta, np.random.default_rng(seed))):
        index = torch.from_numpy(np.asarray(part))
        model = copy.deepcopy(shared) if init == "same" else network(1000 * (seed + 1) + i)
        train(model, x[index], y[index], steps, torch.Generator().manual_seed(i))
        pairs.append((model, data.batches(x[index], y[index], 100)))

    def measured(state: Mapping[str, Tensor]) -> float:
        model = copy.deepcopy(shared)
        model.load_state_dict(dict(state))
        return 100 * evaluate(model, validation, progress=False).accuracy

    uploads = [make_upload(m, b, f"client {i}", rank=None, progress=False) for i, (m, b) in enumerate(pairs)]
    found = {"best client": max(measured(model.state_dict()) for model, _ in pairs)}
    for method in ("fedavg", "regmean", "ma-echo"):
        found[method] = measured(aggregate(uploads, method))
    found["echo-chain"] = measured(aggregate(uploads, "echo-chain", model=shared, draws=DRAWS))
    found["echo-relay"] = measured(relay(shared, pairs, progress=False))
    with patch.object(units, "is_fitted", return_value=True), patch.object(stages, "is_fitted", return_value=True):
        found[f"echo-chain, {REFITTED}"] = measured(aggregate(uploads, "echo-chain", model=shared, draws=DRAWS))
        found[f"echo-relay, {REFITTED}"] = measured(relay(shared, pairs, progress=False))
    return found


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, rng: torch.Generator) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        index = torch.randint(len(x), (64,), generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    model.eval()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*on hidden states")
    main()
