"""Times the Gram matrix of clients' gradients, which the quadratic program takes in every step, in both ways.

    python benchmarks/qp_gram.py

The two ways: (Σ r_i)² products of the columns, or the gradients themselves. Seconds of the processor for one step of
100 outputs, in float64, and the largest difference as a share of the largest entry.
"""

from __future__ import annotations

import time

import torch

from maecho.linalg.spectra import Spectrum
from maecho.linalg.steps.iteration import Columns

SIZES = ((5, 784, 187), (50, 784, 19), (50, 100, 100), (500, 64, 8))
"""Clients, inputs, rank."""
OUT = 100


def main() -> None:
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    print("| clients | inputs | rank | by columns | by gradients | taken | difference |\n|---|---|---|---|---|---|---|")
    for clients, d, r in SIZES:
        bases = [torch.linalg.qr(torch.randn(1, d, r, generator=rng)).Q for _ in range(clients)]
        columns = Columns([Spectrum(torch.ones(1, r), U) for U in bases], torch.float32)
        D = torch.randn(1, OUT, clients * r, generator=rng)
        taken = "columns" if columns._thin_is_cheaper() else "gradients"
        seconds, found = [], []
        for thin in (True, False):
            columns._thin_is_cheaper = lambda thin=thin: thin  # type: ignore
            found.append(columns.gram(D))  # the product UᵀU is made once
            began = time.process_time()
            columns.gram(D)
            seconds.append(f"{time.process_time() - began:.3f} s")
        gap = float((found[0] - found[1]).abs().max() / found[0].abs().max())
        print(f"| {clients} | {d} | {r} | {' | '.join(seconds)} | {taken} | {gap:.0e} |", flush=True)


if __name__ == "__main__":
    main()
