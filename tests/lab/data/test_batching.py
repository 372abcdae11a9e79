"""Batches: in order, or shuffled anew."""

from __future__ import annotations

import pytest
import torch

from maecho.lab.data import batches


def test_batches_cover_the_data_in_order_without_a_generator() -> None:
    x, y = torch.arange(10.0).view(10, 1), torch.arange(10)
    parts = batches(x, y, size=4)
    for _ in range(2):
        seen = list(parts)
        assert len(parts) == len(seen) == 3
        assert [len(b) for _, b in seen] == [4, 4, 2]
        assert torch.equal(torch.cat([a for a, _ in seen]), x)


def test_batches_with_a_generator_are_shuffled_anew_and_reproducible() -> None:
    x, y = torch.arange(50.0).view(50, 1), torch.arange(50)
    parts = batches(x, y, size=8, rng=torch.Generator().manual_seed(0))
    first, second = (torch.cat([b for _, b in parts]) for _ in range(2))
    again = torch.cat([b for _, b in batches(x, y, size=8, rng=torch.Generator().manual_seed(0))])
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(50))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert all(torch.equal(a[:, 0].long(), b) for a, b in parts)


def test_messages() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match="batches: size must be at least 1, got 0"):
        batches(x, y, size=0)
    with pytest.raises(ValueError, match="batches: one label an input, got 2 inputs and 1 labels"):
        batches(x, y[:1])
