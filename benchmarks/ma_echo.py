"""Compares the factored MA-Echo with the literal dense loop, on the paper's MLP with released projectors.

    python benchmarks/ma_echo.py

Clients are 60,000 random examples shared out evenly: time depends on shapes and ranks, not on what the pictures show.
The literal loop is `examples/one_shot.py`. Medians, both on two threads.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import maecho
from maecho.lab.networks import build

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import one_shot

EXAMPLES, BATCH, REPEATS = 60_000, 64, 3


def make_uploads(count: int) -> list[maecho.Upload]:
    rng = torch.Generator().manual_seed(0)
    uploads = []
    for i in range(count):
        batches = [torch.randn(BATCH, 784, generator=rng) for _ in range(EXAMPLES // count // BATCH)]
        model = build("mlp", rng)
        uploads.append(maecho.make_upload(model, batches, f"client-{i}", ["projector"], rank=None, progress=False))
    return uploads


def literal(uploads: list[maecho.Upload]) -> dict[str, torch.Tensor]:
    """Merge every layer but the head by the literal loop, with dense projectors, as the release does."""
    return {
        layer.weight: one_shot.as_released([u.weights[layer.weight] for u in uploads], dense[layer.name])
        for layer in uploads[0].layers[:-1]
    }


dense: dict[str, list[torch.Tensor]] = {}


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(2)
    print(f"{'clients':>8} {'ranks':>16} {'literal s':>10} {'factored s':>11} {'ratio':>6} {'difference':>11}")
    for count in (5, 10, 20, 50):
        uploads = make_uploads(count)
        dense.update(
            {n: [u.statistics["projector"][n].dense()[0] for u in uploads] for n in uploads[0].statistics["projector"]}
        )

        def fast(uploads: list[maecho.Upload] = uploads) -> maecho.Merged:
            return maecho.aggregate(uploads, "ma-echo")

        slow_result, fast_result = literal(uploads), fast()
        difference = max(float((fast_result[key] - value).norm() / value.norm()) for key, value in slow_result.items())
        slow_s = median_seconds(lambda uploads=uploads: literal(uploads), REPEATS)  # type: ignore[misc]
        fast_s = median_seconds(fast, REPEATS)
        ranks = "/".join(str(spectrum.rank) for spectrum in uploads[0].statistics["projector"].values())
        print(f"{count:>8} {ranks:>16} {slow_s:>10.3f} {fast_s:>11.3f} {slow_s / fast_s:>6.1f} {difference:>11.1e}")


if __name__ == "__main__":
    main()
