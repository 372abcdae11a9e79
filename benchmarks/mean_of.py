"""The accuracy of MA-Echo over the size of the groups whose means make the projectors. The default was chosen with it.

A column is a size, or the most means that there may be ("≤ 128"): then the size follows from the number of examples.
Clients are trained on five sixths of the training set. The merged model is measured on the last sixth. The test set is
not used.

    MAECHO_DATA=~/data python benchmarks/mean_of.py
    python benchmarks/mean_of.py --data digits --seeds 0
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import numpy as np
import torch

from maecho import aggregate, evaluate, make_upload
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining
from maecho.statistics import projector

SIZES = (1, 4, 16, 64, 256)
MOST = (64, 128, 256)
COLUMNS = tuple(map(str, SIZES)) + tuple(f"≤ {most}" for most in MOST)


@dataclass(frozen=True)
class Task:
    """A data set, how its clients are trained, and how the examples are divided among them."""

    network: str
    training: LocalTraining
    cells: tuple[tuple[int, float], ...]
    """Clients, β."""


TASKS = {
    "digits": Task(
        "digits-mlp",
        LocalTraining(epochs=60, learning_rate=0.05, momentum=0.5, batch_size=16),
        ((2, 0.1), (5, 0.01), (5, 0.5), (10, 0.1)),
    ),
    "mnist": Task("mlp", LocalTraining(), ((5, 0.01), (20, 0.1))),
}


def one(name: str, clients: int, beta: float, seed: int, columns: Collection[str]) -> dict[str, float]:
    """Column -> accuracy on held-out training data, in per cent."""
    task, dataset = TASKS[name], data.load(name)
    order = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 6], order[len(order) // 6 :]
    x, y = dataset.x_train[kept], dataset.y_train[kept]
    validation = data.batches(dataset.x_train[held], dataset.y_train[held], 1000)
    pairs = []
    for i, part in enumerate(partition.dirichlet(y.numpy(), clients, beta, np.random.default_rng(seed))):
        index = torch.from_numpy(part)
        model = networks.build(task.network, torch.Generator().manual_seed(seed))
        task.training(model, x[index], y[index], torch.Generator().manual_seed(1000 * seed + i))
        pairs.append((model, data.batches(x[index], y[index], 1024)))
    found = {}
    for column in columns:
        with patch.object(projector, "MOST_MEANS", int(column.removeprefix("≤ "))):
            uploads = [
                make_upload(
                    model,
                    batches,
                    f"client-{i}",
                    ["projector", "classes"],
                    None,
                    False,
                    mean_of=None if column.startswith("≤") else int(column),
                )
                for i, (model, batches) in enumerate(pairs)
            ]
        merged = networks.build(task.network, torch.Generator().manual_seed(0))
        merged.load_state_dict(aggregate(uploads, "ma-echo"))
        found[column] = 100 * evaluate(merged, validation, progress=False).accuracy
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])
    parser.add_argument("--out", type=Path, help="a file for the numbers; a later run goes on from it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for name in options.data:
        for seed in options.seeds:
            for clients, beta in TASKS[name].cells:
                key = f"{name} {clients} {beta} {seed}"
                missing = [column for column in COLUMNS if column not in done.get(key, {})]
                if missing:
                    done[key] = done.get(key, {}) | one(name, clients, beta, seed, missing)
                    print(key, {size: round(accuracy, 1) for size, accuracy in done[key].items()}, flush=True)
                if options.out:
                    options.out.write_text(json.dumps(done, indent=1))
    print("\n" + table(done))


def table(done: dict[str, dict[str, float]]) -> str:
    """A row for each cell with its mean over seeds; at the end of each data set, the mean over its cells."""
    rows: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for key, found in done.items():
        name, clients, beta, _ = key.split()
        rows[name][f"{clients} clients, β = {beta}"].append([found[column] for column in COLUMNS])
    lines = [f"| held-out accuracy | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, cells in rows.items():
        for cell, runs in cells.items():
            means = [fmean(run[k] for run in runs) for k in range(len(COLUMNS))]
            lines.append(f"| {name}, {cell} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
        means = [fmean(run[k] for runs in cells.values() for run in runs) for k in range(len(COLUMNS))]
        lines.append(f"| **{name}, mean** | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
