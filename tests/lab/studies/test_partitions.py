"""Figure 2: counts are those of the split, and the overlap has its known values."""

from __future__ import annotations

import numpy as np
import pytest

from maecho.lab import charts, data, partition
from maecho.lab.harness.streams import Streams
from maecho.lab.studies.found import Task
from maecho.lab.studies.partitions import Partitions, overlap

BETAS = (0.01, 0.95, 20.0)


def test_every_example_is_at_one_client_and_more_beta_is_more_overlap() -> None:
    digits = data.digits()
    found = Partitions("digits", 5, BETAS)(Task(3, digits))
    for beta, chart in zip(BETAS, found.charts, strict=True):
        assert isinstance(chart, charts.Bubbles)
        counts = np.array(chart.counts)
        assert counts.shape == (5, 10)
        assert counts.sum(0).tolist() == digits.y_train.bincount(minlength=10).tolist()
        parts = partition.dirichlet(
            digits.y_train.numpy(), 5, beta, Streams("digits", "any", {"clients": 5, "beta": beta}, 3).partition()
        )
        assert counts.sum(1).tolist() == [len(part) for part in parts], "the split of the tables"
    overlaps = [found.numbers[f"overlap of two clients in per cent, β = {beta:g}"] for beta in BETAS]
    assert overlaps == sorted(overlaps)
    assert overlaps[0] < 25
    assert overlaps[2] > 70
    held = [found.numbers[f"classes that a client holds, β = {beta:g}"] for beta in BETAS]
    assert held == sorted(held)


def test_overlap() -> None:
    assert overlap([[5, 5], [50, 50], [1, 1]]) == pytest.approx(1)
    assert overlap([[5, 0], [0, 50]]) == 0
    # One minus half the sum of differences, another way to the same figure.
    rows = np.random.default_rng(0).integers(1, 50, (2, 6))
    p, q = rows / rows.sum(1, keepdims=True)
    assert overlap(rows.tolist()) == pytest.approx(1 - np.abs(p - q).sum() / 2)
