"""Measures the peak memory of RegMean over 20 and 200 upload files of the paper's MLP. It must not grow.

python benchmarks/memory.py
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import maecho
from maecho.lab.networks import build

SIZES = (20, 200)


def write(folder: Path, count: int) -> None:
    rng = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 784, generator=rng) for _ in range(4)]
    upload = maecho.make_upload(build("mlp", rng), batches, "client", ["gram"], rank=None, progress=False)
    for i in range(count):
        replace(upload, client=f"client-{i}").save(folder / f"{i:03}.safetensors")


def peak(folder: Path, count: int) -> float:
    """The peak memory in MB, measured in a separate process."""
    command = [sys.executable, __file__, str(folder), str(count)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(folder: Path, count: int) -> float:
    maecho.aggregate(sorted(folder.glob("*.safetensors"))[:count], "regmean")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, max(SIZES))
        few, many = (peak(folder, count) for count in SIZES)
    print(
        f"RegMean, peak of {SIZES[0]} uploads {few:.0f} MB, of {SIZES[1]} uploads {many:.0f} MB, ratio {many / few:.2f}"
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(measure(Path(sys.argv[1]), int(sys.argv[2])))
    else:
        main()
