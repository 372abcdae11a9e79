"""Compares settings of echo-chain and echo-relay on training data that no client saw. The defaults were found with it.

Clients are trained on five sixths of the training set. The merged model is measured on the last sixth. The
test set is not used.

    python benchmarks/echo_settings.py --jobs 2                                       # MNIST, MLPs
    python benchmarks/echo_settings.py --data cifar10 --network cnn --device cuda --cells 2:0.01 5:0.01 \
        --init different --jobs 4
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import product
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from maecho import Upload, aggregate, evaluate, make_upload, relay
from maecho.echo.fit import Head, Regression
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining

RIDGES = (5e-5, 5e-4, 5e-3)
HEADS: tuple[Head, ...] = ("regression", "ridge", "lda")
PULLS = (0.0, 0.25, 0.75, 1.0)
SMALL = "small"
"""The rank that gives an upload of twice the size of its weights."""


@dataclass(frozen=True)
class Setting:
    """One change of the defaults. A change of the drawn inputs alone has no effect on a relay."""

    regression: Regression = field(default_factory=Regression)
    drawn: Mapping[str, Any] = field(default_factory=dict)
    upload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def relayed(self) -> bool:
        return not self.drawn and not self.upload


SETTINGS: dict[str, Setting] = {
    "defaults": Setting(),
    **{f"ridge {r:g}, head {h}": Setting(Regression(r, h)) for r, h in product(RIDGES, HEADS)},
    **{f"pull {p:g}": Setting(Regression(pull=p)) for p in PULLS},
    "no features": Setting(drawn={"features": False}),
    "Gaussian noise": Setting(drawn={"noise": "gaussian"}),
    "Gaussian noise, no features": Setting(drawn={"noise": "gaussian", "features": False}),
    "40,000 draws": Setting(drawn={"draws": 40_000}),
    "two Gaussians a class": Setting(upload={"gaussians": 2}),
    "one covariance for all classes": Setting(upload={"covariance": "shared"}),
    "statistics as large as the weights": Setting(upload={"rank": SMALL}),
}
del SETTINGS[f"ridge {Regression.ridge:g}, head {Regression.head}"]  # the defaults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cells", nargs="+", default=["5:0.01", "20:0.1", "50:10"], help="clients:beta")
    parser.add_argument("--init", nargs="+", default=["same", "different"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101])
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    runs = [
        (options.data, options.network, options.device, int(cell.split(":")[0]), float(cell.split(":")[1]), init, seed)
        for cell, init, seed in product(options.cells, options.init, options.seeds)
    ]
    chain: dict[str, list[float]] = {name: [] for name in SETTINGS}
    relayed: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with ProcessPoolExecutor(
        options.jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for future in as_completed([pool.submit(one, *run) for run in runs]):
            for name, (drawn, real) in future.result().items():
                chain[name].append(drawn)
                relayed[name] += [] if real is None else [real]
    print(f"{options.data}, {options.network}: means over {len(runs)} splits\n")
    print("| changed | echo-chain | echo-relay |\n|---|---|---|")
    for name in SETTINGS:
        beside = f"{statistics.fmean(relayed[name]):.1f}" if relayed[name] else ""
        print(f"| {name} | {statistics.fmean(chain[name]):.1f} | {beside} |")


def one(
    data_name: str, network: str, device: str, clients: int, beta: float, init: str, seed: int
) -> dict[str, tuple[float, float | None]]:
    """Setting -> accuracies of echo-chain and echo-relay in per cent, on held-out training data."""
    dataset = data.load(data_name)
    order = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 6], order[len(order) // 6 :]
    x, y = dataset.x_train[kept].to(device), dataset.y_train[kept].to(device)
    parts = partition.dirichlet(y.cpu().numpy(), clients, beta, np.random.default_rng(seed))
    validation = data.batches(dataset.x_train[held], dataset.y_train[held], 1000)
    pairs = []
    for i, part in enumerate(parts):
        start = seed if init == "same" else 1000 * (seed + 1) + i
        model = networks.build(network, torch.Generator().manual_seed(start)).to(device)
        index = torch.from_numpy(np.asarray(part)).to(device)
        LocalTraining()(model, x[index], y[index], torch.Generator().manual_seed(i))
        pairs.append((model, data.batches(x[index], y[index], 1000)))
    skeleton = networks.build(network, torch.Generator().manual_seed(0)).to(device)
    weights = sum(tensor.nbytes for tensor in skeleton.state_dict().values())

    def uploads(how: Mapping[str, Any]) -> list[Upload]:
        chosen = {"rank": None, **how}
        if chosen["rank"] == SMALL:
            chosen["rank"] = f"{2 * weights} B"
        made = [
            make_upload(m, b, f"client-{i:02}", ["moments", "features"], progress=False, **chosen)
            for i, (m, b) in enumerate(pairs)
        ]
        return [upload.to(device) for upload in made]

    def accuracy(state: dict[str, torch.Tensor]) -> float:
        model = networks.build(network, torch.Generator().manual_seed(0)).to(device)
        model.load_state_dict(state)
        return 100 * evaluate(model, validation, progress=False).accuracy

    whole = uploads({})
    found: dict[str, tuple[float, float | None]] = {}
    for name, setting in SETTINGS.items():
        given = uploads(setting.upload) if setting.upload else whole
        options = {**asdict(setting.regression), **setting.drawn}
        drawn = accuracy(aggregate(given, "echo-chain", model=skeleton, device=device, **options))
        real = None
        if setting.relayed:
            real = accuracy(relay(skeleton, pairs, regression=setting.regression, progress=False))
        found[name] = (drawn, real)
        told = "" if real is None else f", echo-relay {real:.2f}"
        print(f"{clients}:{beta:g} {init} {seed} {name}: echo-chain {drawn:.2f}{told}", flush=True)
    return found


if __name__ == "__main__":
    main()
