"""Whether numbers are finite, for every type of number."""

from __future__ import annotations

import pytest
import torch

from maecho.linalg.finite import is_finite

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_number_is_enough(dtype: torch.dtype) -> None:
    good = torch.linspace(-2, 2, 1001).to(dtype)
    assert is_finite(good)
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = good.to(torch.float32)
        spoilt[500] = bad
        found = spoilt.to(dtype)
        assert is_finite(found) == bool(found.isfinite().all())
        assert not is_finite(found)


def test_infinities_that_cancel() -> None:
    assert not is_finite(torch.tensor([torch.inf, -torch.inf, 1.0]))


def test_large_numbers_whose_sum_is_not_finite() -> None:
    large = torch.full((1000,), torch.finfo(torch.float32).max)
    assert not large.sum().isfinite()
    assert is_finite(large)
    assert is_finite(torch.full((10,), 60000.0, dtype=torch.float16))


def test_whole_numbers_and_nothing() -> None:
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.ones(0))
    assert is_finite(torch.tensor([True]))
    assert not is_finite(torch.tensor(torch.nan))
