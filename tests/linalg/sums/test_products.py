"""Sums of x xᵀ: those of one product in float64, whatever the pieces, the dtype and the size of the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho.linalg.sums import products
from maecho.linalg.sums.products import PIECE, SquareSums
from support.clients import rng

WIDE = products.NARROW + 13


def rows(n: int, d: int, groups: int = 1) -> Tensor:
    return torch.randn(groups, n, d, generator=rng(n + d), dtype=torch.float64) + 0.7


def summed(x: Tensor, pieces: int | list[int]) -> Tensor:
    one = SquareSums(len(x), x.shape[-1])
    for piece in x.split(pieces, 1):
        one.add(piece)
    return one.dense()


@pytest.mark.parametrize("d", [1, 5, products.NARROW, WIDE, 2 * WIDE])
@pytest.mark.parametrize("pieces", [7, 500, 3 * PIECE])
def test_in_float64_it_is_one_product(d: int, pieces: int) -> None:
    x = rows(PIECE + 500, d, groups=2)
    found = summed(x, pieces)
    torch.testing.assert_close(found, x.mT @ x)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_less_precision_lose_less_than_a_millionth(size: float, dtype: torch.dtype) -> None:
    x = (rows(5 * PIECE + 3, WIDE) * size).to(dtype)
    exact = x.double().mT @ x.double()
    error = torch.linalg.matrix_norm(summed(x, 640) - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    assert float(error) < 1e-6


def test_many_rows_of_float32_are_added_up_in_float64() -> None:
    """In float32 alone, a sum of ones stops growing at 2**24."""
    one = SquareSums(1, WIDE)
    x = torch.ones(1, 2**16, WIDE)
    for _ in range(300):
        one.add(x[:, :PIECE])
    assert float(one.dense()[0, 0, -1]) == 300 * PIECE


def test_fewer_rows_than_inputs_have_no_more_directions_than_rows() -> None:
    x = rows(20, WIDE).float()
    s = torch.linalg.eigvalsh(summed(x, 6)[0])
    assert int((s > 1e-12 * s.max()).sum()) == 20


def test_rows_are_copied() -> None:
    x = rows(9, 4)
    one = SquareSums(1, 4)
    one.add(x)
    expected = x.mT @ x
    x.zero_()
    torch.testing.assert_close(one.dense(), expected)


def test_products_that_torch_may_round_are_not_made_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this setting torch may multiply float32 in bfloat16."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    x = rows(3 * PIECE, WIDE).float()
    torch.testing.assert_close(summed(x, 640), x.double().mT @ x.double(), rtol=1e-12, atol=0)


def test_infinity_is_passed_on() -> None:
    x = rows(200, WIDE).float()
    x[0, 150, 3] = float("inf")
    assert not summed(x, 50).isfinite().all()
