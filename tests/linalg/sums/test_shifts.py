"""The Gram matrix of patches by shifts: that of the patches themselves."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from maecho.linalg.sums import shifts
from maecho.linalg.sums.shifts import patch_gram
from support.clients import rng

SHAPES = [
    ((7, 6), (3, 3)),
    ((3, 3), (3, 3)),
    ((4, 3), (3, 3)),
    ((5, 9), (5, 2)),
    ((1, 8), (1, 3)),
    ((6, 5), (1, 1)),
    ((9, 4), (2, 4)),
]


@pytest.mark.parametrize(("size", "kernel"), SHAPES)
@pytest.mark.parametrize("at_once", [20, 8192])
def test_it_is_the_gram_of_the_patches(
    size: tuple[int, int], kernel: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifts, "AT_ONCE", at_once)
    maps = torch.randn(2, 5, *size, 3, generator=rng(size[0]), dtype=torch.float64)
    gram, sums = patch_gram(maps, kernel)
    for found, total, own in zip(gram, sums, maps, strict=True):
        patches = functional.unfold(own.permute(0, 3, 1, 2), kernel).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(found, patches.T @ patches)
        torch.testing.assert_close(total, patches.sum(0))


def test_a_kernel_of_nine_has_thirteen_shifts() -> None:
    assert len(shifts._shifts((3, 3))) == 13


def test_float32_maps_lose_less_than_a_millionth() -> None:
    maps = torch.rand(1, 40, 20, 20, 8, generator=rng(1))
    gram, _ = patch_gram(maps, (3, 3))
    exact, _ = patch_gram(maps.double(), (3, 3))
    assert float((gram - exact).norm() / exact.norm()) < 1e-6
