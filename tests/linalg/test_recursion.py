"""The recursion for projectors: the release's literal form, recursive least squares, and many columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho.linalg import recursion
from maecho.linalg.recursion import MeanRecursion
from maecho.linalg.spectra import Spectrum
from support.clients import rng


def literal(means: Tensor, damping: float, step: float) -> Tensor:
    """P [g, d, d] by the formula at the top of `recursion.py`."""
    eye = torch.eye(means.shape[-1], dtype=torch.float64)
    found = []
    for of_group in means.double():
        Q = eye
        for r in of_group:
            k = Q @ r
            Q = Q - step * torch.outer(k, k) / (damping + r @ k)
        found.append(eye - Q)
    return torch.stack(found)


def inputs(groups: int, n: int, d: int) -> Tensor:
    return torch.randn(groups, n, d, generator=rng(n), dtype=torch.float64)


@pytest.mark.parametrize(("groups", "n", "d"), [(1, 1, 5), (2, 4, 7), (1, 70, 9), (2, 130, 140), (1, 600, 6)])
def test_it_is_the_literal_recursion(groups: int, n: int, d: int) -> None:
    """70 and 130 columns need more memory than the first 64; 600 are folded into a dense matrix twice."""
    means = inputs(groups, n, d)
    one = MeanRecursion(groups, d)
    for part in means.split(50, 1):
        one.add(part)
    P = one.spectrum()
    torch.testing.assert_close(P.dense(), literal(means, recursion.DAMPING, 0.5))
    assert P.rank == min(n, d)
    assert P.complaint(1.0) is None


def test_a_wide_layer_holds_a_quarter_of_its_width_in_columns() -> None:
    means = inputs(1, 290, 1100)
    one = MeanRecursion(1, 1100)
    one.add(means[:, :275])
    assert one._Q is None
    one.add(means[:, 275:])
    one.settle()
    assert one._Q is not None
    torch.testing.assert_close(torch.eye(1100).double() - one._folded(), literal(means, recursion.DAMPING, 0.5))


@pytest.mark.parametrize("n", [3, 300])
def test_with_a_step_of_one_it_is_the_soft_projector_of_all_inputs(n: int) -> None:
    """Recursive least squares: P = G (G + aI)⁻¹, with the damping a as z."""
    X = inputs(2, n, 5)
    one = MeanRecursion(2, 5, damping=0.3, step=1.0)
    one.add(X)
    G = X.mT @ X
    torch.testing.assert_close(one.spectrum().dense(), G @ torch.linalg.inv(G + 0.3 * torch.eye(5).double()))


def test_the_constants_are_those_of_the_release() -> None:
    one = MeanRecursion(1, 3)
    assert (one.damping, one.step) == (0.01**0.8, 0.5)
    assert recursion.DAMPING_CONVOLUTION == 0.00001**0.8


def test_no_input_is_the_zero_matrix_and_no_eigenvalue_is_above_one() -> None:
    one = MeanRecursion(2, 4)
    assert one.spectrum().rank == 0
    assert torch.equal(one.spectrum().dense(), torch.zeros(2, 4, 4).double())
    exact = MeanRecursion(9, 8, damping=0.0, step=1.0)
    exact.add(inputs(9, 3, 8))
    exact.settle()
    columns = exact._K[..., :3], exact._w[:, :3]
    assert float(Spectrum.of_factor(*columns).values.max()) > 1, "round-off"
    assert float(exact.spectrum().values.max()) == 1


def test_float32_means_are_added_in_float64() -> None:
    means = inputs(1, 9, 4).float()
    one = MeanRecursion(1, 4)
    one.add(means)
    assert one.spectrum().values.dtype == torch.float64
    torch.testing.assert_close(one.spectrum().dense(), literal(means, recursion.DAMPING, 0.5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pieces", [1, 5, 63, 64, 65, 200])
def test_blocks_are_the_same_whatever_the_pieces(pieces: int) -> None:
    means = inputs(2, 200, 30)
    one, other = MeanRecursion(2, 30), MeanRecursion(2, 30)
    for part in means.split(pieces, 1):
        one.add(part)
    other.add(means)
    torch.testing.assert_close(one.spectrum().dense(), other.spectrum().dense(), rtol=0, atol=1e-12)
    torch.testing.assert_close(one.spectrum().dense(), literal(means, recursion.DAMPING, 0.5))


def test_means_are_copied() -> None:
    means = inputs(1, 3, 4)
    one = MeanRecursion(1, 4)
    one.add(means)
    expected = literal(means, recursion.DAMPING, 0.5)
    means.zero_()
    torch.testing.assert_close(one.spectrum().dense(), expected)


def test_round_off_of_large_means_is_not_taken_for_a_direction() -> None:
    """The same large mean again and again: what is left of it is round-off, which may even be negative."""
    means = 1e12 * torch.ones(1, 200, 6, dtype=torch.float64)
    one = MeanRecursion(1, 6)
    one.add(means)
    found = one.spectrum()
    assert found.complaint(1.0) is None
    assert float(found.values[0, 0]) == pytest.approx(1.0)
    assert float(found.values.sum()) == pytest.approx(1.0, abs=1e-3)
