"""How the defaults of echo-chain and echo-relay were found: ridge, head, pull, on training data that no client saw.

Clients are trained on five sixths of the training set, and what their merge knows is measured on the last sixth. The
test set is not looked at.

    python benchmarks/echo_settings.py                                     # MNIST, MLPs
    python benchmarks/echo_settings.py --data cifar10 --network cnn --device cuda --cells 2:0.01 5:0.01
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict

import numpy as np
import torch
from torch import nn

from maecho import aggregate, data, evaluate, make_upload, networks, partition, relay
from maecho.aggregation.regression import Head, Regression
from maecho.training import LocalTraining

RIDGES = (5e-5, 5e-4, 5e-3, 5e-2)
HEADS: tuple[Head, ...] = ("regression", "ridge", "lda")
PULLS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""At the default ridge and head."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cells", nargs="+", default=["5:0.01", "20:0.1", "50:10"], help="clients:beta")
    parser.add_argument("--init", nargs="+", default=["same", "different"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101])
    parser.add_argument("--draws", nargs="+", type=int, default=[20_000])
    options = parser.parse_args()

    found: dict[tuple[str, float, str], list[float]] = {}
    for cell in options.cells:
        for init in options.init:
            for seed in options.seeds:
                clients, beta = int(cell.split(":")[0]), float(cell.split(":")[1])
                for key, accuracy in one(options, clients, beta, init, seed).items():
                    found.setdefault(key, []).append(accuracy)
                    print(f"{cell} {init} {seed} {key[0]} {key[2]} {key[1]:g}: {accuracy:.2f}", flush=True)
    for method in sorted({key[0] for key in found}):
        pulled = [f"pull {pull:g} {statistics.fmean(found[method, pull, 'pull']):.2f}" for pull in PULLS]
        print(f"{method}: {', '.join(pulled)}")
    print("\n| method | ridge | " + " | ".join(HEADS) + " |\n|---|---|" + "---|" * len(HEADS))
    for method in sorted({key[0] for key in found}):
        for ridge in RIDGES:
            means = [f"{statistics.fmean(found[method, ridge, head]):.2f}" for head in HEADS]
            print(f"| {method} | {ridge:g} | " + " | ".join(means) + " |")


def one(
    options: argparse.Namespace, clients: int, beta: float, init: str, seed: int
) -> dict[tuple[str, float, str], float]:
    """Accuracy in per cent on held-out training data, by method, ridge and head."""
    dataset = data.load(options.data)
    order = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 6], order[len(order) // 6 :]
    x, y = dataset.x_train[kept], dataset.y_train[kept]
    parts = partition.dirichlet(y.numpy(), clients, beta, np.random.default_rng(seed))
    validation = data.batches(dataset.x_train[held], dataset.y_train[held], 1000)
    pairs = []
    for i, part in enumerate(parts):
        start = seed if init == "same" else 1000 * (seed + 1) + i
        model = networks.build(options.network, torch.Generator().manual_seed(start)).to(options.device)
        index = torch.from_numpy(np.asarray(part))
        LocalTraining()(model, x[index], y[index], torch.Generator().manual_seed(i))
        pairs.append((model, data.batches(x[index], y[index], 1000)))
    uploads = [
        make_upload(m, b, f"client-{i:02}", ["moments", "features"], rank=None, progress=False)
        for i, (m, b) in enumerate(pairs)
    ]
    skeleton = networks.build(options.network, torch.Generator().manual_seed(0)).to(options.device)

    def accuracy(state: dict[str, torch.Tensor]) -> float:
        model: nn.Module = networks.build(options.network, torch.Generator().manual_seed(0)).to(options.device)
        model.load_state_dict(state)
        return 100 * evaluate(model, validation, progress=False).accuracy

    found = {}

    def measure(settings: Regression, value: float, what: str) -> None:
        found["echo-relay", value, what] = accuracy(relay(skeleton, pairs, regression=settings, progress=False))
        for draws in options.draws:
            state = aggregate(
                uploads, "echo-chain", model=skeleton, device=options.device, draws=draws, **asdict(settings)
            )
            found[f"echo-chain, {draws} draws", value, what] = accuracy(state)

    for ridge in RIDGES:
        for head in HEADS:
            measure(Regression(ridge, head), ridge, head)
    for pull in PULLS:
        measure(Regression(pull=pull), pull, "pull")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
