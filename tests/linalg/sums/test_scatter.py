"""Count, mean and scatter of rows in batches: those of all rows at once, also where only a sketch is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.sums import scatter
from maecho.linalg.sums.scatter import Scatter
from support.clients import rng

LONG = scatter.EXACT_WIDTH + 6


def rows(n: int, d: int, rank: int | None = None, mean: float = 3.0) -> Tensor:
    """Rows of a low rank, if one is given, around a mean that is not 0."""
    draw = rng(n)
    x = torch.randn(n, rank or d, generator=draw, dtype=torch.float64)
    return (x if rank is None else x @ torch.randn(rank, d, generator=draw).double()) + mean


def gathered(x: Tensor, shape: tuple[int, ...], size: int = 50) -> Scatter:
    one = Scatter(shape)
    for batch in x.split(size):
        one.add(batch)
    return one


@pytest.mark.parametrize("size", [1, 7, 40])
def test_batches_give_the_moments_of_all_rows(size: int) -> None:
    x = rows(40, 6)
    one = gathered(x, (2, 3), size)
    assert one.count == 40
    torch.testing.assert_close(one.mean, x.mean(0))
    torch.testing.assert_close(one.covariance().dense()[0], x.T.cov(correction=0))
    assert one.folded_away() is None


def test_a_small_variance_is_seen_beside_a_large_mean() -> None:
    x = rows(60, 3, mean=0.0)
    torch.testing.assert_close(
        gathered(x + 1e8, (3,), 11).covariance().dense()[0], x.T.cov(correction=0), rtol=1e-6, atol=1e-6
    )


def test_float32_rows_are_summed_in_float64() -> None:
    x = (rows(30, 4) * 1000).float()
    found = gathered(x, (4,), 8).covariance().dense()[0]
    torch.testing.assert_close(found, x.double().T.cov(correction=0))


def test_two_scatters_add_around_their_own_means() -> None:
    first, second = rows(20, 5), rows(30, 5, mean=-9.0)
    one = gathered(first, (5,))
    one.add_scatter(gathered(second, (5,)))
    expected = (20 * first.T.cov(correction=0) + 30 * second.T.cov(correction=0)) / 50
    assert one.count == 50
    torch.testing.assert_close(one.covariance().dense()[0], expected)


def test_the_limits_are_what_the_documents_say() -> None:
    assert (scatter.EXACT_WIDTH, scatter.EXACT_ON_GPU, scatter.SKETCH) == (1024, 4096, 512)
    assert Scatter((32, 32)).folded_away() is None
    assert Scatter((1025,))._scatter.shape == (0, 1025)
    assert Scatter((1024,))._sums is not None


@pytest.mark.parametrize("n", [300, 1300])
def test_long_rows_of_low_rank_lose_nothing(n: int) -> None:
    """1,300 rows are more than the stack holds, so it is folded on the way."""
    x = rows(n, LONG, rank=20)
    one = gathered(x, (LONG,), 200)
    found, expected = one.covariance(), x.T.cov(correction=0)
    assert len(one._scatter) <= 2 * scatter.SKETCH
    torch.testing.assert_close(found.dense()[0], expected, rtol=1e-6, atol=1e-6)
    lost = one.folded_away()
    assert lost is not None
    torch.testing.assert_close(lost, torch.zeros(2, LONG).double())


def test_a_sketch_keeps_the_leading_directions_and_says_what_it_lost() -> None:
    shape = (2, LONG // 2)
    spread = torch.cat([torch.full((30,), 40.0), torch.full((LONG - 30,), 0.5)]).double()
    x = rows(1400, LONG, mean=0.0) * spread
    one = gathered(x, shape, 300)
    found, whole = one.covariance(), x.T.cov(correction=0)
    assert found.rank == scatter.SKETCH
    leading = torch.linalg.eigvalsh(whole).flip(0)[:30]
    torch.testing.assert_close(found.values[0, :30], leading, rtol=1e-3, atol=0.0)
    lost = one.folded_away()
    assert lost is not None
    held = found.dense()[0]
    torch.testing.assert_close(held.diagonal() + lost[0], whole.diagonal())
    of_cosines = [cosines.forth(cosines.forth(M, shape).T, shape).diagonal() for M in (held, whole)]
    torch.testing.assert_close(of_cosines[0] + lost[1], of_cosines[1])
    assert float(lost.min()) >= 0
    assert float(lost[0, 30:].sum()) > 10


def test_what_two_sketches_lost_adds_up() -> None:
    shape = (2, LONG // 2)
    parts = [rows(1100, LONG, mean=0.0), rows(1200, LONG, mean=0.0)]
    one = gathered(parts[0], shape, 400)
    one.add_scatter(gathered(parts[1], shape, 400))
    scatters = sum(len(x) * x.T.cov(correction=0) for x in parts)
    held, lost = one.covariance().dense()[0], one.folded_away()
    assert lost is not None
    torch.testing.assert_close(held.diagonal() + lost[0], scatters.diagonal() / 2300)


def test_sketches_add_like_exact_scatters() -> None:
    first, second = rows(600, LONG, rank=30), rows(700, LONG, rank=25, mean=-2.0)
    one = gathered(first, (LONG,), 300)
    one.add_scatter(gathered(second, (LONG,), 300))
    expected = (600 * first.T.cov(correction=0) + 700 * second.T.cov(correction=0)) / 1300
    torch.testing.assert_close(one.covariance().dense()[0], expected, rtol=1e-6, atol=1e-6)
    lost = one.folded_away()
    assert lost is not None
    torch.testing.assert_close(lost, torch.zeros(2, LONG).double())
    # Flat rows have no cosines: that half stays empty.
    assert not one._squares[1].any()
