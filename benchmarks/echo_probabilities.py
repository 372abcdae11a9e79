"""Compares how sure merged models are, on training data that no client saw. The default scale and the bound on
disagreement were chosen with it.

Clients are trained on five sixths of the training set; the merged model is measured on the last sixth. The test set
is not used. "one model" are twins: clients that share one model, trained on all their data, and differ in data alone.

    python benchmarks/echo_probabilities.py                                  # scikit-learn's digits
    python benchmarks/echo_probabilities.py --data mnist --network mlp --epochs 10 --cells 5:0.01 --seeds 100
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from maecho import Upload, aggregate, evaluate, make_upload, relay
from maecho.echo import fit
from maecho.echo.totals import UnitSums
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining

Numbers = tuple[float, float, float]
"""Accuracy in per cent, the mean of the top probability, and the calibration error in per cent."""


def unscaled(W: Tensor, of_outputs: Tensor, sums: UnitSums) -> float:
    """Scores as they were fitted, to labels of 0 and 1."""
    return 1.0


def least_squares(W: Tensor, of_outputs: Tensor, sums: UnitSums) -> float:
    """The factor after which centred scores come nearest to the clients' centred outputs."""
    V = W - W.mean(0)
    return float((V * sums.cross[0]).sum() / (V * (V @ sums.gram[0])).sum())


def from_regression(W: Tensor, of_outputs: Tensor, sums: UnitSums) -> float:
    """The factor after which scores are as large as those of the head that is fitted to the outputs."""
    V, U = W - W.mean(0), of_outputs - of_outputs.mean(0)
    return float(((U * (U @ sums.gram[0])).sum() / (V * (V @ sums.gram[0])).sum()).sqrt())


VARIANTS: dict[str, tuple[str, Any]] = {
    "defaults": ("DISAGREEING", fit.DISAGREEING),
    "scores as fitted": ("scale", unscaled),
    "scaled by least squares": ("scale", least_squares),
    "as large as regression's": ("scale", from_regression),
    "agreement ignored": ("DISAGREEING", 1e-30),
    "bound on disagreement 0.05": ("DISAGREEING", 0.05),
    "bound on disagreement 0.2": ("DISAGREEING", 0.2),
}
"""What is changed in maecho.echo.fit."""
INITS = ("same", "different", "one model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--network", default="digits-mlp")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--cells", nargs="+", default=["5:0.01", "5:0.5"], help="clients:beta")
    parser.add_argument("--init", nargs="+", default=INITS, choices=INITS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for init in options.init:
        found: dict[str, list[Numbers]] = {}
        for cell, seed in product(options.cells, options.seeds):
            clients, beta = cell.split(":")
            measured = one(options.data, options.network, options.epochs, int(clients), float(beta), init, seed)
            for name, numbers in measured.items():
                found.setdefault(name, []).append(numbers)
        print(f"\n{options.data}, {init}: means over {len(options.cells) * len(options.seeds)} splits\n")
        print("| | accuracy | top probability | calibration error |\n|---|---|---|---|")
        for name, several in found.items():
            accuracy, top, error = (statistics.fmean(column) for column in zip(*several, strict=True))
            print(f"| {name} | {accuracy:.1f} | {top:.2f} | {error:.1f} |", flush=True)


def one(
    data_name: str, network: str, epochs: int, clients: int, beta: float, init: str, seed: int
) -> Mapping[str, Numbers]:
    """What each method and variant reaches on held-out training data."""
    dataset = data.load(data_name)
    order = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 6], order[len(order) // 6 :]
    x, y = dataset.x_train[kept], dataset.y_train[kept]
    validation = data.batches(dataset.x_train[held], dataset.y_train[held], 1000)
    training = LocalTraining(epochs=epochs)
    shared = networks.build(network, torch.Generator().manual_seed(seed))
    if init == "one model":
        training(shared, x, y, torch.Generator().manual_seed(0))
    pairs = []
    for i, part in enumerate(partition.dirichlet(y.numpy(), clients, beta, np.random.default_rng(seed))):
        index = torch.from_numpy(np.asarray(part))
        model = copy.deepcopy(shared)
        if init == "different":
            model = networks.build(network, torch.Generator().manual_seed(1000 * (seed + 1) + i))
        if init != "one model":
            training(model, x[index], y[index], torch.Generator().manual_seed(i))
        pairs.append((model, data.batches(x[index], y[index], 1000)))

    def measure(model: nn.Module) -> Numbers:
        found = evaluate(model, validation, progress=False)
        with torch.no_grad():
            top = torch.cat([model(x).softmax(1).amax(1) for x, _ in validation])
        return 100 * found.accuracy, float(top.mean()), 100 * found.calibration_error

    def measured(state: Mapping[str, Tensor]) -> Numbers:
        model = copy.deepcopy(shared)
        model.load_state_dict(state)
        return measure(model.eval())

    def uploads(*names: str) -> list[Upload]:
        return [
            make_upload(m, b, f"client-{i:02}", list(names), rank=None, progress=False)
            for i, (m, b) in enumerate(pairs)
        ]

    of_clients = [measure(model.eval()) for model, _ in pairs]
    out: dict[str, Numbers] = {"clients": tuple(map(statistics.fmean, zip(*of_clients, strict=True)))}  # type: ignore[dict-item]
    out["regmean"] = measured(aggregate(uploads("gram"), "regmean"))
    moments = uploads("moments", "features")
    methods: dict[str, Callable[[], Mapping[str, Tensor]]] = {
        "echo-relay": lambda: relay(shared, pairs, progress=False),
        "echo-chain": lambda: aggregate(moments, "echo-chain", model=shared),
    }
    for variant, (attribute, value) in VARIANTS.items():
        with patch.object(fit, attribute, value):
            for method, merge in methods.items():
                out[f"{method}, {variant}"] = measured(merge())
    return out


if __name__ == "__main__":
    main()
