"""Seeds: those of other purposes are others, and none has changed since results were written down."""

from __future__ import annotations

from maecho.randomness import seed_of
from maecho.synthesis.pseudo import seed_for


def test_seeds_are_those_of_the_committed_results() -> None:
    assert seed_of("0/clinic-a") == seed_for(0, "clinic-a") == 177337882624873


def test_seeds_of_other_purposes_are_others() -> None:
    seeds = [seed_of(text) for text in ("", "a", "b", "a/b", "0/a", "1/a")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**48 for seed in seeds)
