"""Seconds of a round in which 20 of 1,000 clients train the paper's MLP: side by side, and one by one, in the same run.

python benchmarks/rounds.py [--clients 1000] [--sampled 20] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics

import torch

from maecho.lab import networks
from maecho.rounds import Rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--sampled", type=int, default=20)
    parser.add_argument("--examples", type=int, default=60, help="of each client; MNIST over 1,000 clients gives 60")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.rand(options.examples, 784, generator=draw), torch.randint(0, 2, (options.examples,), generator=draw))
        for _ in range(options.clients)
    ]
    model = networks.build("mlp", torch.Generator().manual_seed(0))
    seconds = {}
    for side in (True, False):
        run = Rounds(options.rounds, options.sampled, side_by_side=side)
        records = run(model, clients, clients[0]).records
        name = "side by side" if side else "one by one"
        seconds[name] = statistics.median(record.training + record.merging for record in records)
        print(f"{name}: {seconds[name]:.3f} s a round (the median), on {torch.get_num_threads()} threads")
    print(f"one by one takes {seconds['one by one'] / seconds['side by side']:.1f} times as long")


if __name__ == "__main__":
    main()
