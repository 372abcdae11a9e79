"""Measures how long echo-chain takes for 20 MNIST MLPs, beside MA-Echo, RegMean and DENSE at its small budget.

    python benchmarks/echo.py            # needs MNIST in the folder MAECHO_DATA

Clients are trained as in Table 1 (20 clients, β = 0.1). Times are of the merge alone, all on as many threads as torch
takes; accuracy is on the test set.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from maecho import aggregate, evaluate, make_upload
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining

METHODS = ("ma-echo", "regmean", "echo-chain", "dense")
REPEATS = 3


def main() -> None:
    dataset = data.load("mnist")
    test = data.batches(dataset.x_test, dataset.y_test, 1000)
    uploads = []
    for i, part in enumerate(partition.dirichlet(dataset.y_train.numpy(), 20, 0.1, np.random.default_rng(0))):
        index = torch.from_numpy(np.asarray(part))
        model = networks.build("mlp", torch.Generator().manual_seed(0))
        LocalTraining()(model, dataset.x_train[index], dataset.y_train[index], torch.Generator().manual_seed(i))
        uploads.append(
            make_upload(model, data.batches(dataset.x_train[index], dataset.y_train[index]), f"client-{i:02}")
        )
    network = networks.build("mlp", torch.Generator().manual_seed(0))
    print(f"20 MLPs, {torch.get_num_threads()} threads\n\n| method | seconds | accuracy |\n|---|---|---|")
    for method in METHODS:
        seconds = []
        for _ in range(1 if method == "dense" else REPEATS):
            began = time.perf_counter()
            merged = aggregate(uploads, method, model=network)
            seconds.append(time.perf_counter() - began)
        network.load_state_dict(merged)
        accuracy = 100 * evaluate(network, test, progress=False).accuracy
        print(f"| {method} | {statistics.median(seconds):.1f} | {accuracy:.1f} |", flush=True)


if __name__ == "__main__":
    main()
