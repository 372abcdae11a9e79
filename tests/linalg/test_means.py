"""Means of many tensors against float64: how exact they are, and what they share memory with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho.linalg import means
from maecho.linalg.means import RunningMean, pieces
from support.clients import rng


def drawn(count: int, spread: float, seed: int = 0) -> list[Tensor]:
    """Tensors around a common one."""
    draw = rng(seed)
    start = torch.randn(5000, generator=draw)
    return [start + spread * torch.randn(5000, generator=draw) for _ in range(count)]


def mean_of(values: list[Tensor], weights: list[float]) -> tuple[Tensor, float]:
    running = RunningMean()
    for value, weight in zip(values, weights, strict=True):
        running.add([value], weight)
    (mean,), total = running.result()
    assert isinstance(total, float)
    return mean, total


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 50, 64, 65, 300])
def test_a_mean_of_float32_is_as_exact_as_float32(count: int) -> None:
    values, weights = drawn(count, 0.2), [float(100 + i) for i in range(count)]
    found, total = mean_of(values, weights)
    wanted = sum(w * v.double() for v, w in zip(values, weights, strict=True)) / sum(weights)
    assert isinstance(wanted, Tensor)
    assert float((found - wanted).norm() / wanted.norm()) < 6e-8
    assert total == sum(weights)


def test_equal_tensors_are_their_own_mean() -> None:
    (value,) = drawn(1, 0.0)
    found, _ = mean_of([value.clone() for _ in range(70)], [1.0 + i for i in range(70)])
    assert torch.equal(found, value)


def test_large_numbers_do_not_overflow() -> None:
    found, _ = mean_of([torch.full((3,), 3e38)] * 20, [1e6] * 20)
    assert torch.equal(found, torch.full((3,), 3e38))


def test_what_is_added_is_not_changed_and_the_result_is_where_it_was_asked_for() -> None:
    values = drawn(20, 1.0)
    before = [value.clone() for value in values]
    out = torch.empty(5000)
    running = RunningMean([out])
    for value in values:
        running.add([value], 1.0)
    (found,), _ = running.result()
    assert found is out
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))


@pytest.mark.parametrize("count", [1, 2, 9, 70])
def test_every_entry_may_have_its_own_weight(count: int) -> None:
    """Entries without any weight get some number, and the sum of their weights says so."""
    values = drawn(count, 1.0)
    weights = [torch.rand(5000, generator=rng(i)) ** 8 * (torch.arange(5000) % 7 != i % 7) for i in range(count)]
    weights = [weight * (torch.arange(5000) >= 10) for weight in weights]
    before = [weight.clone() for weight in weights]
    running = RunningMean()
    for value, weight in zip(values, weights, strict=True):
        running.add([value], [weight])
    (found,), totals = running.result()
    assert not isinstance(totals, float)
    bottom = torch.stack(weights).double().sum(0)
    top = torch.stack([w.double() * v.double() for v, w in zip(values, weights, strict=True)]).sum(0)
    known = bottom > 0
    assert not bool(known[:10].any())
    wanted = top[known] / bottom[known]
    assert float((found[known] - wanted).norm() / wanted.norm()) < 2e-7
    torch.testing.assert_close(totals[0].double(), bottom, rtol=1e-6, atol=0)
    assert bool(found.isfinite().all())
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_pieces_hold_every_entry_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "BLOCK", 10)
    sizes = {"a": 3, "b": 25, "scalar": 1, "empty": 0, "c": 10, "d": 11}
    tensors = {name: torch.arange(size) for name, size in sizes.items()}
    tensors["turned"] = torch.arange(40).reshape(8, 5).T
    lists = list(pieces({name: [tensor] for name, tensor in tensors.items()}))
    seen = {name: torch.cat([torch.empty(0, dtype=torch.int64)]) for name in tensors}
    for together in lists:
        for piece in together:
            seen[piece.name] = torch.cat([seen[piece.name], piece.of(tensors[piece.name]).flatten()])
        assert len(together) == 1 or sum(piece.end - piece.begin for piece in together) <= 10 * torch.get_num_threads()
    assert all(torch.equal(seen[name], tensor.flatten()) for name, tensor in tensors.items())
    assert [piece.whole for together in lists for piece in together if piece.name == "turned"] == [True]
