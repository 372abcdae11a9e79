"""Random streams: independent where they should be, shared where a comparison wants it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from maecho.lab import partition
from maecho.lab.harness.streams import Streams, stream

FIRST = Streams("mnist", "mlp", {"clients": 5, "beta": 0.01, "init": "same"}, 0)
OTHERS = {
    "data": replace(FIRST, data="digits"),
    "clients": replace(FIRST, cell={**FIRST.cell, "clients": 6}),
    "beta": replace(FIRST, cell={**FIRST.cell, "beta": 0.1}),
    "seed": replace(FIRST, seed=1),
}


def draws(streams: Streams) -> dict[str, int]:
    """What identifies each stream of a run."""
    return {
        "partition": int(streams.partition().integers(2**62)),
        "initial": streams.initial(0).initial_seed(),
        "training 0": streams.training(0).initial_seed(),
        "training 1": streams.training(1).initial_seed(),
        "batches 0": streams.batches(0).initial_seed(),
        "batches 1": streams.batches(1).initial_seed(),
        "labels 0": streams.labels(0).initial_seed(),
        "labels 1": streams.labels(1).initial_seed(),
        "method": streams.method(),
    }


def test_one_run_has_streams_for_every_purpose() -> None:
    found = draws(FIRST)
    assert len(set(found.values())) == len(found)
    assert draws(replace(FIRST)) == found, "the same each time"


@pytest.mark.parametrize("other", OTHERS)
def test_whatever_identifies_a_run_decides_all_its_streams(other: str) -> None:
    mine, others = draws(FIRST), draws(OTHERS[other])
    assert not set(mine.values()) & set(others.values())


def test_initial_weights_are_shared_or_not_as_the_cell_says() -> None:
    assert FIRST.initial(0).initial_seed() == FIRST.initial(4).initial_seed()
    different = replace(FIRST, cell={**FIRST.cell, "init": "different"})
    seeds = [different.initial(i).initial_seed() for i in range(5)]
    assert len({*seeds, FIRST.initial(0).initial_seed()}) == 6


def test_rows_that_differ_in_the_initialisation_have_one_partition_and_nothing_else() -> None:
    mine, others = draws(FIRST), draws(replace(FIRST, cell={**FIRST.cell, "init": "different"}))
    assert {key for key in mine if mine[key] == others[key]} == {"partition"}


def test_rows_of_a_table_share_no_luck() -> None:
    """With one seed for all β the client with most of a class was the same in every row."""
    labels = np.repeat(np.arange(10), 600)
    rows = []
    for beta in (0.01, 0.1, 0.5):
        holders = []
        for seed in range(6):
            rng = Streams("mnist", "mlp", {"clients": 5, "beta": beta}, seed).partition()
            parts = partition.dirichlet(labels, 5, beta, rng)
            holders += partition.class_counts(labels, parts, 10).argmax(0).tolist()
        rows.append(np.array(holders))
    for one, other in combinations(rows, 2):
        # 60 holders, one in five alike by chance: more than 28 has a probability below 1e-6.
        assert (one == other).sum() <= 28


def test_streams_are_those_of_today() -> None:
    """Results are compared over years: a change of these numbers must be meant."""
    assert stream("a", b=1).generate_state(2).tolist() == TODAY
    assert stream("a", b=1, c=None).generate_state(2).tolist() != TODAY
    assert all(one != other for one, other in pairwise(draws(FIRST).values()))


TODAY = [992713954, 999860471]
