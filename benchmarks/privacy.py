"""The cost of differential privacy: echo-chain and echo-relay on scikit-learn's digits at several strengths of noise.

    python benchmarks/privacy.py

There are three clients at β = 0.3, trained as in the README, and one split. Figures are means over draws of the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from maecho import Privacy, aggregate, evaluate, make_upload, relay
from maecho.echo.fit import Regression
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining

NOISES = (0.3, 1.0, 2.0, 5.0)
DRAWS = 5
CLIP_OF_CHAIN, CLIP_OF_RELAY, STAGES = 8.0, 1.0, 3


def main() -> None:
    digits = data.digits()
    test = data.batches(digits.x_test, digits.y_test)
    pairs = []
    for i, part in enumerate(partition.dirichlet(digits.y_train.numpy(), 3, 0.3, np.random.default_rng(0))):
        index = torch.from_numpy(np.asarray(part))
        model = networks.build("digits-mlp", torch.Generator().manual_seed(0))
        x, y = digits.x_train[index], digits.y_train[index]
        LocalTraining(epochs=60, learning_rate=0.05, batch_size=16)(model, x, y, torch.Generator().manual_seed(i))
        pairs.append((model, data.batches(x, y, 16)))
    network = networks.build("digits-mlp", torch.Generator().manual_seed(0))

    def accuracy(state: Mapping[str, Tensor]) -> float:
        network.load_state_dict(state)
        return 100 * evaluate(network, test, progress=False).accuracy

    def chain(privacy: Privacy | None) -> float:
        uploads = [
            make_upload(m, b, f"client {i}", ["moments"], None, False, privacy=privacy)
            for i, (m, b) in enumerate(pairs)
        ]
        return accuracy(aggregate(uploads, "echo-chain", model=network))

    def relayed(privacy: Privacy | None, regression: Regression | None = None) -> float:
        return accuracy(relay(network, pairs, regression=regression, privacy=privacy, progress=False))

    sizes = [len(batches.y) for _, batches in pairs]
    average = accuracy(aggregate([make_upload(m, b, f"{i}", []) for i, (m, b) in enumerate(pairs)], "fedavg"))
    print(f"examples {sizes}; without noise: echo-relay {relayed(None):.1f}, echo-chain {chain(None):.1f}")
    print(f"average of the weights {average:.1f}\n")
    heads = (
        "noise σ",
        f"chain (clip {CLIP_OF_CHAIN:g}): ε",
        "accuracy",
        f"relay (clip {CLIP_OF_RELAY:g}, {STAGES} releases): ε",
        "accuracy",
        'with `head="lda"`',
    )
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for noise in NOISES:
        found: list[tuple[float, float, float]] = []
        for seed in range(DRAWS):
            rng = torch.Generator().manual_seed(seed)
            once, thrice = Privacy(noise, CLIP_OF_CHAIN, generator=rng), Privacy(noise, CLIP_OF_RELAY, generator=rng)
            found.append((chain(once), relayed(thrice), relayed(thrice, Regression(head="lda"))))
        means = [f"{statistics.fmean(column):.1f}" for column in zip(*found, strict=True)]
        epsilons = f"{once.epsilon():.2g}", f"{thrice.epsilon(STAGES):.2g}"
        print("| " + " | ".join([f"{noise:g}", epsilons[0], means[0], epsilons[1], *means[1:]]) + " |")


if __name__ == "__main__":
    main()
