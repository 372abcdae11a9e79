"""Measures how far merged models depend on the units of what flows through the network.

Inputs times s with the first layer's weights times 1/s are the same function, and so is a ReLU layer whose outputs are
times s before a layer whose weights are times 1/s. Five clients train on scikit-learn's digits, with few classes each,
from the same weights, and are merged in the usual units and in others. A number is the distance between the outputs of
the two merged models on test images, in per cent of their norm. In brackets is by how many points the accuracy changes.
Both are means over the seeds. The first column has the accuracy in the usual units.

    python benchmarks/units.py                              # every method, three seeds
    python benchmarks/units.py --methods regmean relay --seeds 0 --inputs 0.001 --hidden
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maecho import METHODS, Upload, aggregate, evaluate, make_upload, relay
from maecho.aggregation import AFL, DENSE, EchoChain, Kronecker, MAEcho
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining
from maecho.network.spaces import load

CLIENTS = 5
BETA = 0.05
SIZES = {"digits": (64, 100, 50, 10), "mnist": (784, 400, 200, 100, 10)}
TRAINING = LocalTraining(epochs=40, learning_rate=0.05, momentum=0.5, batch_size=16)
EXAMPLES = 6000
"""Clients share out at most so many training images."""
SETTINGS: Mapping[str, Any] = {
    **METHODS,
    "afl": AFL(backbone="average"),
    "dense": DENSE(epochs=2, generator_steps=5, student_steps=20, input_shape=(1, 8, 8)),
    "echo-chain": EchoChain(draws=4000),
    "ma-echo, exact": MAEcho(projector="exact"),
    "ma-echo, printed": MAEcho(form="printed"),
    "ma-echo, anchored": MAEcho(form="anchored"),
    "ma-echo, limit": MAEcho(form="printed", solver="limit"),
    "kronecker, relative": Kronecker(damping=1e-3),
    "relay": None,
}
"""What is measured. AFL gets clients that share no backbone, and the two that train or draw get small budgets."""
STATISTICS = ["gram", "projector", "classes", "moments", "features", "targets", "fisher", "gradients"]
Batches = Iterable[tuple[Tensor, Tensor]]
Client = tuple[nn.Module, Batches]
Federation = tuple[list[Client], Batches]
Change = Callable[[nn.Module, Batches], tuple[nn.Module, Batches]]


def of_inputs(s: float) -> Change:
    """Inputs times s, and the first weights times 1/s."""

    def change(model: nn.Module, batches: Batches) -> tuple[nn.Module, Batches]:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.get_parameter("fc1.weight").div_(s)
        return changed, [(x * s, y) for x, y in batches]

    return change


def of_hidden(s: float) -> Change:
    """The outputs of the first layer times s, and the second weights times 1/s."""

    def change(model: nn.Module, batches: Batches) -> tuple[nn.Module, Batches]:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.get_parameter("fc1.weight").mul_(s)
            changed.get_parameter("fc1.bias").mul_(s)
            changed.get_parameter("fc2.weight").div_(s)
        return changed, batches

    return change


def federation(name: str, seed: int, held_out: bool, different: bool) -> Federation:
    """Trained clients with their data, and data to measure on: test images, or training images that no client has."""
    found = data.DATASETS[name]()
    test = data.batches(found.x_test, found.y_test, 500)
    x, y = found.x_train[:EXAMPLES], found.y_train[:EXAMPLES]
    if held_out:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        kept, others = order[: len(x) * 5 // 6], order[len(x) * 5 // 6 :]
        x, y, test = x[kept], y[kept], data.batches(x[others], y[others], 500)
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    start = networks.mlp(SIZES[name], bias=True)
    made: list[Client] = []
    for part in partition.dirichlet(y.numpy(), CLIENTS, BETA, np.random.default_rng(seed)):
        model, index = networks.mlp(SIZES[name], bias=True), torch.from_numpy(part)
        if not different:
            model.load_state_dict(start.state_dict())
        TRAINING(model, x[index], y[index], rng)
        made.append((model, data.batches(x[index], y[index], 16)))
    return made, test


def merged(pairs: Sequence[Client], names: Sequence[str]) -> dict[str, nn.Module]:
    """The merged model of every method."""
    found = {}
    uploads: list[Upload] = []
    if set(names) != {"relay"}:
        needed = sorted({n for name in names if SETTINGS[name] for n in used(SETTINGS[name])}, key=STATISTICS.index)
        uploads = [make_upload(m, b, f"client-{i}", needed, progress=False) for i, (m, b) in enumerate(pairs)]
    for name in names:
        model = copy.deepcopy(pairs[0][0])
        state = (
            relay(model, pairs, progress=False) if name == "relay" else aggregate(uploads, SETTINGS[name], model=model)
        )
        found[name] = load(model, state).eval()
    return found


def used(method: Any) -> set[str]:
    """The statistics that a method reads."""
    return set(method.needs) | set(getattr(method, "uses", ()))


def outputs(model: nn.Module, batches: Batches) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x) for x, _ in batches]).double()


def measure(
    federations: Iterable[Federation],
    names: Sequence[str],
    changes: Mapping[str, Change],
) -> None:
    """Print one row for each method."""
    accuracies: dict[str, list[float]] = {name: [] for name in names}
    apart: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for pairs, test in federations:
        usual = merged(pairs, names)
        for name, model in usual.items():
            accuracies[name].append(100 * evaluate(model, test).accuracy)
        for title, change in changes.items():
            other = merged([change(*pair) for pair in pairs], names)
            _, inputs = change(pairs[0][0], test)
            for name, model in other.items():
                before, after = outputs(usual[name], test), outputs(model, inputs)
                gap = 100 * float((after - before).norm() / before.norm())
                points = 100 * evaluate(model, inputs).accuracy - accuracies[name][-1]
                apart.setdefault((name, title), []).append((gap, points))
    width = max(map(len, names))
    print("  ".join([" " * width, "right", *(f"{title:>17}" for title in changes)]))
    for name in names:
        cells = []
        for title in changes:
            gaps, changed = zip(*apart[name, title], strict=True)
            cells.append(f"{fmean(gaps):9.2g} ({fmean(changed):+5.1f})".rjust(17))
        print("  ".join([f"{name:<{width}}", f"{fmean(accuracies[name]):5.1f}", *cells]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--inputs", nargs="*", type=float, default=[0.1, 0.001, 10, 1000])
    parser.add_argument("--hidden", nargs="*", type=float, default=[0.01, 100])
    parser.add_argument("--data", choices=SIZES, default="digits")
    parser.add_argument("--init", choices=["same", "different"], default="same")
    parser.add_argument("--held-out", action="store_true", help="measure on training images that no client has")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # some clients lack classes, and so have no inputs at some neurons
    changes = {f"inputs x {s:g}": of_inputs(s) for s in chosen.inputs}
    changes |= {f"layer 1 x {s:g}": of_hidden(s) for s in chosen.hidden}
    different = chosen.init == "different"
    federations = (federation(chosen.data, seed, chosen.held_out, different) for seed in chosen.seeds)
    measure(federations, chosen.methods, changes)


if __name__ == "__main__":
    main()
