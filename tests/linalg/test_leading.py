"""The leading directions of large matrices: nearly those of a full eigenproblem."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho.linalg.leading import SMALL, Leading, leading, leading_of_gram
from maecho.linalg.spectra import Spectrum
from support.clients import rng

WIDE = SMALL + 150


def matrix(eigenvalues: Tensor, groups: int = 1) -> Tensor:
    d = len(eigenvalues)
    U = torch.linalg.qr(torch.randn(groups, d, d, generator=rng(d), dtype=torch.float64)).Q
    A = (U * eigenvalues) @ U.mT
    return (A + A.mT) / 2


DECAYS = {
    "fast": 0.9 ** torch.arange(WIDE).double(),
    "slow": 1 / (1 + torch.arange(WIDE).double()),
    "flat": torch.linspace(2, 1, WIDE).double(),
    "huge": 1e30 / (1 + torch.arange(WIDE).double()) ** 2,
    "tiny": 1e-30 / (1 + torch.arange(WIDE).double()) ** 2,
}


@pytest.mark.parametrize("decay", DECAYS)
def test_they_hold_nearly_as_much_as_is_possible(decay: str) -> None:
    s = DECAYS[decay]
    found = leading(matrix(s, groups=2), 50)
    assert isinstance(found, Leading)
    assert found.rank == 50
    best, left = s[: found.rank].sum(), s[found.rank :].sum()
    held = found.values.sum(-1)
    assert bool((best - held <= 0.02 * left).all())
    torch.testing.assert_close(found.trace, s.sum().expand(2))
    if decay != "flat":
        torch.testing.assert_close(found.values[0, :10], s[:10], rtol=1e-6, atol=0)
    eye = torch.eye(found.rank, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(found.basis.mT @ found.basis, eye, rtol=0, atol=1e-10)


def test_the_matrix_that_is_left_is_nearly_the_best() -> None:
    A = matrix(DECAYS["slow"])
    found = leading(A, 50)
    whole = Spectrum.of_dense(A)
    for rank in (5, 20, 50):
        error = (A - found.cut(rank).dense()).norm()
        assert float(error) <= 1.02 * float((A - whole.cut(rank).dense()).norm())


def test_a_matrix_of_low_rank_is_whole() -> None:
    s = torch.zeros(WIDE, dtype=torch.float64)
    s[:30] = torch.arange(30, 0, -1)
    found = leading(matrix(s), 50)
    assert not isinstance(found, Leading)
    assert found.rank == 30
    assert found.rest is None
    torch.testing.assert_close(found.dense(), matrix(s))


def test_shares_are_of_the_whole_trace() -> None:
    found, whole = leading(matrix(DECAYS["slow"]), 60), Spectrum.of_dense(matrix(DECAYS["slow"]))
    for share in (0.3, 0.5, 0.6):
        assert found.rank_for(share) == whole.rank_for(share)
    assert found.rank_for(0.999) > found.rank
    assert found.rank_for(1.0) == WIDE


@pytest.mark.parametrize(("rank", "d"), [(None, WIDE), (50, SMALL), (WIDE // 3, WIDE)])
def test_small_matrices_are_done_in_full(rank: int | None, d: int) -> None:
    assert leading(matrix(torch.ones(d).double()), rank).rank == d


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(wrong: float) -> None:
    A = torch.full((1, WIDE, WIDE), wrong, dtype=torch.float64)
    with pytest.raises(ValueError, match="finite, got NaN or infinity"):
        leading(A, 20)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_directions_of_a_gram_lead_in_its_unit(scale: float) -> None:
    """The constant of a bias is as large as the data, whatever the units of the data."""
    n = 900
    x = torch.randn(n, WIDE, generator=rng(3), dtype=torch.float64) * 0.97 ** torch.arange(WIDE) + 0.1
    X = torch.cat([scale * x, torch.ones(n, 1, dtype=torch.float64)], 1).unsqueeze(0)
    G = X.mT @ X
    found, whole = leading_of_gram(G, True, 50), Spectrum.of_gram(G, True)
    assert isinstance(found, Leading)
    assert found.unit is not None
    torch.testing.assert_close(found.unit, whole.unit)
    torch.testing.assert_close(found.trace, whole.trace)
    torch.testing.assert_close(found.values[0, :10], whole.values[0, :10], rtol=1e-6, atol=0)
    for share in (0.3, 0.7):
        assert found.rank_for(share) == whole.rank_for(share)
    found, whole = found.cut(20, keep_rest=True), whole.cut(20, keep_rest=True)
    assert not isinstance(found, Leading)
    error = (found.dense() - whole.dense())[0]
    assert float(error[:-1, :-1].norm() / whole.dense()[0, :-1, :-1].norm()) < 1e-3
    assert float(error[-1, -1].abs()) < 1e-3 * n


def test_what_is_made_of_leading_directions_forgets_the_others() -> None:
    found = leading(matrix(DECAYS["slow"]), 50)
    for made in (found.cut(10), found.cut(10, keep_rest=True), found.held(), found.map(torch.sqrt), found.completed()):
        assert type(made) is Spectrum
    assert type(found.to(dtype=torch.float32)) is Leading


def test_zero_has_no_directions() -> None:
    assert leading(torch.zeros(1, WIDE, WIDE), 20).rank == 0
