"""How time and memory of every method, and of `make_upload`, grow with clients, width and depth.

    python benchmarks/scaling.py            # clients 5 to 320, widths 32 to 256, depths 4 to 16
    python benchmarks/scaling.py --quick    # small sizes, as the test takes them

For each of the three, sizes are doubled while the others stay as they are. The exponent is the slope of log time (of
the processor, least of some runs) over log size, on the upper half of the sizes: 1 is linear. Memory is the most that
the process takes beyond what it had after a run of the smallest size. Uploads are files; their layers are of full rank,
the worst case. Twice the width is 4 times the work of a product and 8 times that of an eigenvalue problem, so there
exponents of 2 to 3 are what they must be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import maecho
from maecho.statistics import STATISTICS

CLIENTS, WIDTH, DEPTH = 5, 32, 4
"""The sizes that stay as they are."""
SIZES = {"clients": (5, 10, 20, 40, 80, 160, 320), "width": (32, 64, 128, 256), "depth": (4, 8, 16)}
QUICK = {"clients": (8, 16, 32), "width": (16, 32), "depth": (4, 8, 16)}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "regmean": {},
    "fisher": {},
    "afl": {"backbone": "average"},
    "kronecker": {"iterations": 5, "tolerance": 0.99},
    "ma-echo": {"steps": 5},
    "ma-echo, limit": {"solver": "limit"},
    "ma-echo, qp": {"steps": 5, "form": "printed", "alpha": "qp"},
    "ot": {},
    "fedma": {},
    "echo-chain": {"draws": 2000, "chunk": 500},
}
"""Row -> options. `ma-echo+ot` is `ot`, then `ma-echo`. `pfnm` is `fedma`. `dense` trains as long as it is told to."""
CLIENT = "make_upload"
REPEATS = 3


def network(width: int, depth: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 5))


def batches(width: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(50, width, generator=rng), torch.randint(0, 5, (50,), generator=rng)) for _ in range(4)]


def write(folder: Path, clients: int, width: int, depth: int) -> list[Path]:
    """The files of so many clients. Four are made, the others are these with other names."""
    made = []
    for i in range(min(4, clients)):
        upload = maecho.make_upload(
            network(width, depth, i), batches(width, i), f"{i:03}", STATISTICS, rank=None, progress=False
        )
        made.append(upload)
    paths = []
    for i in range(clients):
        object.__setattr__(made[i % 4], "client", f"{i:03}")
        paths.append(folder / f"{i:03}.safetensors")
        made[i % 4].save(paths[-1])
    return paths


def measure(row: str, clients: int, width: int, depth: int, repeats: int = REPEATS) -> float:
    """Seconds of the processor."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        paths = write(Path(name), clients, width, depth) if row != CLIENT else []
        model, data = network(width, depth, 0), batches(width, 0)

        def work() -> None:
            if row == CLIENT:
                maecho.make_upload(model, data, "client", STATISTICS, progress=False)
            else:
                maecho.aggregate(paths, row.split(",")[0], model=model, **METHODS[row])

        return min([timed(work) for _ in range(repeats)])


def series(row: str, what: str, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """For each size, the smallest first: seconds, and the peak memory in bytes beyond that at the start."""
    torch.set_num_threads(1)
    fixed, found = {"clients": CLIENTS, "width": WIDTH, "depth": DEPTH}, []
    measure(row, **fixed, repeats=1)  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in sizes:
        seconds = measure(row, **{**fixed, what: size})
        found.append((seconds, 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))
    return found


def timed(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The slope of log value over log size, between the middle and the largest size."""
    at = (len(sizes) - 1) // 2
    return math.log(max(values[-1], 1e-9) / max(values[at], 1e-9)) / math.log(sizes[-1] / sizes[at])


def in_process(row: str, what: str, sizes: Sequence[int]) -> list[tuple[float, float]]:
    command = [sys.executable, __file__, "--measure", row, what, ",".join(map(str, sizes))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return [(seconds, peak) for seconds, peak in json.loads(answer)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=";".join([CLIENT, *METHODS]))
    parser.add_argument("--measure", nargs=3, metavar=("ROW", "WHAT", "SIZES"))
    chosen = parser.parse_args()
    if chosen.measure:
        row, what, numbers = chosen.measure
        print(json.dumps(series(row, what, [int(number) for number in numbers.split(",")])))
        return
    table = QUICK if chosen.quick else SIZES
    print("| | " + " | ".join(f"{what} {sizes[0]} to {sizes[-1]}: time, MB" for what, sizes in table.items()) + " |")
    print("|---" * (len(table) + 1) + "|")
    for row in chosen.only.split(";"):
        cells = []
        for what, sizes in table.items():
            if row == CLIENT and what == "clients":
                cells.append("–")
                continue
            found = in_process(row, what, sizes)
            slope = exponent(sizes, [seconds for seconds, _ in found])
            first, last = (peak / 1e6 for peak in (found[0][1], found[-1][1]))
            cells.append(f"{slope:.1f} ({found[-1][0]:.2f} s), {first:.0f} to {last:.0f}")
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
