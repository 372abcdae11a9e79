"""Partitions by origin and by label sets: whole groups, even pieces, nothing twice."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maecho.lab.partition import by_groups, by_labels


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(20, 40), min_size=1, max_size=12), st.integers(1, 20), st.integers(0, 9))
def test_groups_stay_whole_or_are_cut_evenly(sizes: list[int], clients: int, seed: int) -> None:
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))
    parts = by_groups(groups, clients, np.random.default_rng(seed))
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups))), "every example once"
    holders = {value: [len(p) for p in parts if value in groups[p]] for value in set(groups.tolist())}
    if len(sizes) >= clients:
        assert all(len(held) == 1 for held in holders.values())
        # A client gets a group only while it has the least: nobody has more than another by more than one group.
        assert max(map(len, parts)) - min(map(len, parts)) <= max(sizes)
    else:
        assert all(len(set(groups[part].tolist())) == 1 for part in parts)
        for value, size in zip(sorted(holders), sizes, strict=True):
            pieces = [int((groups[part] == value).sum()) for part in parts if value in groups[part]]
            assert max(pieces) - min(pieces) <= 1
            assert sum(pieces) == size
            assert abs(len(pieces) - clients / len(sizes)) < 1


def test_the_largest_group_gets_the_spare_client() -> None:
    groups = np.repeat([0, 1, 2], [10, 40, 20])
    parts = by_groups(groups, 4, np.random.default_rng(0))
    assert sorted((int(groups[part[0]]), len(part)) for part in parts) == [(0, 10), (1, 20), (1, 20), (2, 20)]


def test_label_sets_are_kept_and_shared_labels_divided() -> None:
    labels = np.repeat([0, 1, 2, 3], [10, 11, 12, 13])
    parts = by_labels(labels, [[0, 1], [1, 2]], np.random.default_rng(0))
    assert [np.bincount(labels[part], minlength=4).tolist() for part in parts] == [[10, 6, 0, 0], [0, 5, 12, 0]]
    assert len(np.unique(np.concatenate(parts))) == 33, "nothing twice"
    assert labels[parts[0]].tolist() != sorted(labels[parts[0]].tolist()), "shuffled"


def test_the_generator_decides() -> None:
    groups = np.repeat(np.arange(20), 5)

    def drawn(divide: Callable[..., list[np.ndarray]], seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        second = 4 if divide is by_groups else [[1, 2], [2, 3]]
        return [part.tolist() for part in divide(groups, second, rng)]

    for divide in (by_groups, by_labels):
        assert drawn(divide, 1) == drawn(divide, 1) != drawn(divide, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rng: by_groups([0, 1], 0, rng), "by_groups: clients must be at least 1, got 0"),
        (lambda rng: by_groups([0, 0, 1, 1], 7, rng), "by_groups: group 0 has 2 examples, too few for its 4 clients"),
        (lambda rng: by_groups([0.5], 1, rng), "by_groups: labels must be one non-empty row of integers"),
        (lambda rng: by_labels([0, 1], [[0], []], rng), "by_labels: every client must have one label or more, got"),
        (lambda rng: by_labels([0, 1], [], rng), "by_labels: every client must have one label or more, got []"),
        (
            lambda rng: by_labels([0, 1], [[0], [5]], rng),
            "by_labels: label 5 has 0 examples, too few for the 1 clients that list it",
        ),
    ],
)
def test_messages(call: Callable[[np.random.Generator], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(np.random.default_rng(0))
