"""Sums of thin products are the sums of the matrices themselves, in whatever unit these are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from maecho.linalg.spectra import Spectrum
from maecho.linalg.sums.weighted import Sums


@pytest.mark.parametrize("shrink", [1.0, 0.8])
@pytest.mark.parametrize("rank", [2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_thin_products_add_up_to_the_matrices(bias: bool, rank: int, shrink: float) -> None:
    rng = torch.Generator().manual_seed(0)
    grams, weights = [], []
    for scale in (0.01, 1.0, 100.0):
        x = scale * torch.randn(2, 9, 5, generator=rng, dtype=torch.float64)
        if bias:
            x = torch.cat([x[..., :-1], torch.ones(2, 9, 1, dtype=torch.float64)], -1)
        grams.append(Spectrum.of_gram(x.mT @ x, bias).cut(rank, keep_rest=True))
        weights.append(torch.randn(2, 3, 5, generator=rng, dtype=torch.float64))
    sums = Sums(shrink)
    for W, G in zip(weights, grams, strict=True):
        assert (G.unit is not None) is bias
        sums.add(W, G)
    totals = [G.total().shrunk(shrink) for G in grams]
    wanted = totals[0].plus(totals[1]).plus(totals[2])
    torch.testing.assert_close(sums.gram.after(torch.eye(5, dtype=torch.float64)[None]), wanted.matrix)
    torch.testing.assert_close(sums.gram.mean_eigenvalue, wanted.mean_eigenvalue)
    product = torch.stack([total.after(W) for W, total in zip(weights, totals, strict=True)]).sum(0)
    torch.testing.assert_close(sums.product, product)
    other = torch.randn(2, 3, 5, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(sums.gram.divide(other), wanted.divide(other))


def test_a_unit_changes_the_sum() -> None:
    G = Spectrum.of_gram(4 * torch.eye(3, dtype=torch.float64)[None], True)
    sums, without = Sums(), Sums()
    sums.add(None, replace(G, unit=torch.full((1,), 2.0, dtype=torch.float64)))
    without.add(None, replace(G, unit=None))
    eye = torch.eye(3, dtype=torch.float64)[None]
    found, plain = sums.gram.after(eye), without.gram.after(eye)
    torch.testing.assert_close(found[0, 2, 2], plain[0, 2, 2] / 4)
