"""Partitions: every example goes to one client, and the fast rule agrees with the paper's."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maecho.lab.partition import by_classes, class_counts, dirichlet

if TYPE_CHECKING:
    from jaxtyping import Int

MNIST_SIZES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def released_counts(
    sizes: list[int], clients: int, beta: float, rng: np.random.Generator, min_size: int
) -> Int[np.ndarray, "clients classes"]:
    """The rule as the MA-Echo release writes it: one try after the other, on lists of indices."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    smallest = -1
    while smallest < min_size:
        held: list[list[int]] = [[] for _ in range(clients)]
        for c in range(len(sizes)):
            indices = np.where(labels == c)[0]
            p = rng.dirichlet(np.repeat(beta, clients))
            p = np.array([q * (len(h) < len(labels) / clients) for q, h in zip(p, held, strict=True)])
            p = p / p.sum()
            cuts = (np.cumsum(p) * len(indices)).astype(int)[:-1]
            held = [h + piece.tolist() for h, piece in zip(held, np.split(indices, cuts), strict=True)]
        smallest = min(len(h) for h in held)
    return np.array([np.bincount(labels[h], minlength=len(sizes)) for h in held])


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=30, max_size=200),
    clients=st.integers(1, 6),
    beta=st.sampled_from([1e-320, 1e-3, 0.1, 1.0, 100.0, 1e300]),
    min_size=st.integers(0, 1),
    seed=st.integers(0, 2**32),
)
def test_dirichlet_deals_every_example_once(
    labels: list[int], clients: int, beta: float, min_size: int, seed: int
) -> None:
    # At tiny beta a class reaches one client, so a minimum could not be met with fewer classes than clients.
    min_size = min_size if beta >= 0.1 else 0
    parts = dirichlet(labels, clients, beta, np.random.default_rng(seed), min_size=min_size)
    again = dirichlet(labels, clients, beta, np.random.default_rng(seed), min_size=min_size)

    assert len(parts) == clients
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert min(len(part) for part in parts) >= min_size
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), classes=st.integers(1, 6), clients=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_by_classes_divides_each_class_over_its_holders(
    data: st.DataObject, classes: int, clients: int, seed: int
) -> None:
    sizes = data.draw(st.lists(st.integers(8, 30), min_size=classes, max_size=classes))
    each = data.draw(st.integers(1, classes))
    labels = np.repeat(np.arange(classes), sizes)
    parts = by_classes(labels, clients, each, np.random.default_rng(seed))
    again = by_classes(labels, clients, each, np.random.default_rng(seed))
    counts = class_counts(labels, parts, classes)
    holders = (counts > 0).sum(axis=0)

    assert ((counts > 0).sum(axis=1) == each).all()
    assert holders.max() - holders.min() <= 1
    assert len(np.unique(np.concatenate(parts))) == sum(len(part) for part in parts)
    for c in range(classes):
        held = counts[counts[:, c] > 0, c]
        assert held.sum() == (sizes[c] if holders[c] else 0)
        assert not holders[c] or held.max() - held.min() <= 1
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_by_classes_leaves_out_classes_without_a_holder() -> None:
    labels = np.repeat(np.arange(10), 5)
    counts = class_counts(labels, by_classes(labels, 2, 3, np.random.default_rng(0)), 10)
    assert (counts.sum(axis=0) == 5).sum() == 6
    assert (counts.sum(axis=0) == 0).sum() == 4


def test_by_classes_favours_no_client() -> None:
    """Any two of four clients share a class equally often."""
    labels = np.repeat(np.arange(4), 4)
    meetings = np.zeros((4, 4))
    for seed in range(600):
        has = class_counts(labels, by_classes(labels, 4, 2, np.random.default_rng(seed)), 4) > 0
        meetings += has.astype(int) @ has.T.astype(int) > 0
    pairs = meetings[np.triu_indices(4, 1)] / 600
    assert np.ptp(pairs) < 0.1


def test_parts_come_shuffled() -> None:
    labels = np.repeat(np.arange(3), 100)
    for parts in (
        dirichlet(labels, 2, 10.0, np.random.default_rng(0)),
        by_classes(labels, 2, 3, np.random.default_rng(0)),
    ):
        assert all((np.diff(part) < 0).any() and (np.diff(labels[part]) < 0).any() for part in parts)


def test_the_examples_of_a_class_are_shared_out_at_random() -> None:
    """A cut of a class in the order of the data would give a client neighbours, such as one writer's digits."""
    labels = np.repeat(np.arange(2), 100)
    for parts in (
        dirichlet(labels, 2, 10.0, np.random.default_rng(0)),
        by_classes(labels, 2, 2, np.random.default_rng(0)),
    ):
        for part in parts:
            own = np.sort(part[part < 100])
            assert len(own) >= 10
            assert np.ptp(own) > 1.2 * len(own), "neighbours"


def test_a_client_with_its_fair_share_gets_nothing_more() -> None:
    """At tiny beta each class goes to one client as a whole. That is the client's fair share, so each has one class."""
    labels = np.repeat(np.arange(8), 25)
    for seed in range(20):
        counts = class_counts(labels, dirichlet(labels, 8, 1e-9, np.random.default_rng(seed), min_size=0), 8)
        assert (np.sort(counts, axis=1)[:, -1] == 25).all()
        assert (counts.sum(axis=1) == 25).all()


def test_nobody_passes_the_fair_share_by_more_than_the_class_that_crossed_it() -> None:
    labels = np.repeat(np.arange(10), 60)
    for seed in range(20):
        counts = class_counts(labels, dirichlet(labels, 5, 0.3, np.random.default_rng(seed)), 10)
        before = np.cumsum(counts, axis=1) - counts
        assert (counts[before >= 600 / 5] == 0).all()


@pytest.mark.parametrize(("beta", "min_size"), [(0.5, 30), (0.2, 15)])
def test_counts_first_has_the_law_of_the_release(beta: float, min_size: int) -> None:
    sizes, clients, draws = [40, 60, 30, 50], 3, 1500
    labels = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(7)
    ours = np.array(
        [class_counts(labels, dirichlet(labels, clients, beta, rng, min_size), len(sizes)) for _ in range(draws)]
    )
    theirs = np.array([released_counts(sizes, clients, beta, rng, min_size) for _ in range(draws)])

    assert ours.shape == theirs.shape == (draws, clients, len(sizes))
    for statistic in (
        lambda counts: np.sort(counts.sum(axis=2), axis=1),
        lambda counts: np.sort(counts, axis=1).reshape(draws, -1),
        lambda counts: counts.reshape(draws, -1) ** 2,
    ):
        a, b = statistic(ours), statistic(theirs)
        error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / draws)
        assert np.all(np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4 * error + 1e-9)


@pytest.mark.parametrize("clients", [10, 20])
def test_the_papers_hardest_split_takes_seconds(clients: int) -> None:
    labels = np.repeat(np.arange(10), MNIST_SIZES)
    start = time.perf_counter()
    parts = dirichlet(labels, clients, 0.01, np.random.default_rng(0))
    assert time.perf_counter() - start < 20
    assert min(len(part) for part in parts) >= 10
    assert sum(len(part) for part in parts) == 60_000


def test_class_counts_counts_classes_a_part_lacks() -> None:
    counts = class_counts([0, 2, 2, 1], [np.array([0, 1, 2]), np.array([3])], 4)
    assert counts.tolist() == [[1, 0, 2, 0], [0, 1, 0, 0]]
    assert class_counts([0], [], 4).shape == (0, 4)


TEN = np.repeat(np.arange(2), 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rng: dirichlet(TEN, 0, 0.5, rng), "dirichlet: clients must be at least 1, got 0"),
        (lambda rng: dirichlet(TEN, 1, 0.0, rng), "dirichlet: beta must be positive and finite, got 0.0"),
        (lambda rng: dirichlet(TEN, 1, float("nan"), rng), "dirichlet: beta must be positive and finite, got nan"),
        (lambda rng: dirichlet(TEN, 1, float("inf"), rng), "dirichlet: beta must be positive and finite, got inf"),
        (lambda rng: dirichlet(TEN, 1, 0.5, rng, min_size=-1), "dirichlet: min_size must be at least 0, got -1"),
        (lambda rng: dirichlet(TEN, 1, 0.5, rng, max_tries=0), "dirichlet: max_tries must be at least 1, got 0"),
        (
            lambda rng: dirichlet(TEN, 2, 0.5, rng),
            "dirichlet: 2 clients with at least 10 examples each need 20, got 10",
        ),
        (
            lambda rng: dirichlet(TEN, 5, 1e-9, rng, min_size=1, max_tries=50),
            "dirichlet: none of 50 tries gave each of 5 clients 1 examples at beta=1e-09 (2 classes, 10 examples): "
            "raise beta or max_tries, lower clients or min_size",
        ),
        (
            lambda rng: dirichlet([[1]], 1, 0.5, rng),
            "dirichlet: labels must be one non-empty row of integers, got shape (1, 1)",
        ),
        (
            lambda rng: dirichlet([], 1, 0.5, rng),
            "dirichlet: labels must be one non-empty row of integers, got shape (0,)",
        ),
        (
            lambda rng: by_classes([0.5], 1, 1, rng),
            "by_classes: labels must be one non-empty row of integers, got shape (1,) of",
        ),
        (lambda rng: by_classes(TEN, 0, 1, rng), "by_classes: clients must be at least 1, got 0"),
        (
            lambda rng: by_classes(TEN, 1, 3, rng),
            "by_classes: classes_per_client must lie between 1 and the 2 classes of the labels, got 3",
        ),
        (
            lambda rng: by_classes(TEN, 1, 0, rng),
            "by_classes: classes_per_client must lie between 1 and the 2 classes of the labels, got 0",
        ),
        (
            lambda rng: by_classes(TEN, 6, 2, rng),
            "by_classes: class 0 has 5 examples, too few for the 6 clients that hold it; ask for fewer clients or "
            "fewer classes_per_client",
        ),
        (
            lambda _: class_counts([0, 3], [], 3),
            "class_counts: labels must lie in 0..2, got 0..3 for classes=3",
        ),
    ],
)
def test_messages(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(np.random.default_rng(0))
