"""Factored matrices agree with dense ones, on every matrix of the zoo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maecho.linalg.spectra import Spectrum, projector
from support.clients import rng


def test_factors_give_the_matrix_back(gram: Tensor) -> None:
    spectrum = Spectrum.of_dense(gram)
    torch.testing.assert_close(spectrum.dense(), gram, rtol=1e-9, atol=1e-12 * float(gram.abs().max()))
    assert spectrum.complaint() is None
    assert spectrum.rank == int(torch.linalg.matrix_rank(gram[0], hermitian=True))


def test_product_without_building_the_matrix(gram: Tensor) -> None:
    M = torch.randn(1, 4, gram.shape[-1], generator=rng(), dtype=torch.float64)
    scale = float(gram.abs().max())
    torch.testing.assert_close(Spectrum.of_dense(gram).after(M), M @ gram, rtol=1e-9, atol=1e-10 * scale)


def test_soft_projector_is_the_papers(gram: Tensor) -> None:
    """G (G + zI)⁻¹ is Xᵀ (X Xᵀ + zI)⁻¹ X, by the push-through identity."""
    z = 0.1 * float(gram.abs().max()) or 1.0
    P = projector(Spectrum.of_dense(gram), z)
    identity = torch.eye(gram.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(P.dense(), gram @ torch.linalg.inv(gram + z * identity), rtol=1e-8, atol=1e-9)
    assert P.complaint(1.0) is None


@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 10**6))
def test_cut_keeps_the_best_rank_r_part(d: int, rank: int, seed: int) -> None:
    X = torch.randn(5, d, generator=rng(seed), dtype=torch.float64)
    A = (X.T @ X).unsqueeze(0)
    full = Spectrum.of_dense(A)
    cut = full.cut(rank)
    assert cut.rank == min(rank, full.rank)
    left = float((A - cut.dense()).diagonal(dim1=-2, dim2=-1).sum())
    assert left == pytest.approx(float(full.values[:, rank:].sum()), abs=1e-9 * float(A.abs().max()))


@given(st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_rank_for_is_the_fewest_directions_with_that_share(share: float, seed: int) -> None:
    X = torch.randn(9, 6, generator=rng(seed), dtype=torch.float64)
    spectrum = Spectrum.of_dense((X.T @ X).unsqueeze(0))
    rank = spectrum.rank_for(share)
    total = float(spectrum.values.sum())
    assert float(spectrum.values[:, :rank].sum()) >= share * total * (1 - 1e-12)
    if rank > 1:
        assert float(spectrum.values[:, : rank - 1].sum()) < share * total


def test_of_factor_is_of_dense() -> None:
    K = torch.randn(2, 7, 3, generator=rng(), dtype=torch.float64)
    w = torch.rand(2, 3, generator=rng(), dtype=torch.float64)
    torch.testing.assert_close(Spectrum.of_factor(K, w).dense(), (K * w.unsqueeze(-2)) @ K.mT)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "symmetric, got entries that differ by 2"),
        (torch.tensor([[1.0, 0.0], [0.0, -0.5]]), "positive semidefinite, got the eigenvalue -0.5"),
        (torch.tensor([[1.0, 0.0], [0.0, float("nan")]]), "finite, got NaN or infinity"),
    ],
)
def test_what_is_not_symmetric_and_psd_is_refused(matrix: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Spectrum.of_dense(matrix.unsqueeze(0))
