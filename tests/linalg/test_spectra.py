"""Factored matrices agree with dense ones, on every matrix of the zoo."""

from __future__ import annotations

import re

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


def made(groups: int = 2, d: int = 5) -> Spectrum:
    X = torch.randn(groups, 9, d, generator=rng(5), dtype=torch.float64)
    return Spectrum.of_dense(X.mT @ X)


def test_eigenvalues_descend_and_a_given_rank_is_kept() -> None:
    one = made()
    assert bool((one.values.diff(dim=-1) <= 0).all())
    X = torch.randn(1, 2, 5, generator=rng(6), dtype=torch.float64)
    A = X.mT @ X
    assert [Spectrum.of_dense(A, rank).rank for rank in (None, 0, 1, 2, 4)] == [2, 0, 1, 2, 2]
    torch.testing.assert_close(Spectrum.of_dense(A, 1).values, Spectrum.of_dense(A).values[:, :1])


def test_the_group_of_the_highest_rank_decides() -> None:
    A = torch.diag_embed(torch.tensor([[1.0, 0, 0], [3.0, 2.0, 0]]))
    one = Spectrum.of_dense(A)
    assert one.values.tolist() == [[1, 0], [3, 2]]


def test_round_off_is_no_direction() -> None:
    A = torch.diag(torch.tensor([1.0, 1e-14, 1e-17], dtype=torch.float64)).unsqueeze(0)
    assert Spectrum.of_dense(A).rank == 2


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_matrix_may_be_off_by_the_tolerance_and_no_more(factor: float) -> None:
    """From symmetric, and from semidefinite: TOLERANCE as a share of the largest entry."""
    skew = torch.tensor([[[100.0, factor * 0.1], [0.0, 50.0]]])
    negative = torch.diag_embed(torch.tensor([[100.0, -factor * 0.1]]))
    for matrix in (skew, negative):
        if factor > 1:
            with pytest.raises(ValueError, match=r"symmetric|semidefinite"):
                Spectrum.of_dense(matrix)
        else:
            torch.testing.assert_close(Spectrum.of_dense(matrix).dense(), matrix.double(), rtol=0, atol=0.1)
            assert float(Spectrum.of_dense(matrix).values.min()) >= 0


def test_float32_gives_eigenvalues_in_float64() -> None:
    one = Spectrum.of_dense(torch.eye(3).unsqueeze(0))
    assert (one.values.dtype, one.basis.dtype) == (torch.float64, torch.float64)
    assert Spectrum.of_dense(torch.zeros(1, 0, 0)).rank == 0


@pytest.mark.parametrize("columns", [1, 4, 5, 8])
def test_a_factor_of_any_shape_gives_its_matrix(columns: int) -> None:
    K = torch.randn(2, 5, columns, generator=rng(), dtype=torch.float64)
    w = torch.rand(2, columns, generator=rng(1), dtype=torch.float64)
    one = Spectrum.of_factor(K, w)
    torch.testing.assert_close(one.dense(), (K * w.unsqueeze(-2)) @ K.mT)
    assert one.rank == min(columns, 5)
    assert one.complaint() is None


def test_zero_has_no_directions() -> None:
    zero = Spectrum.zero(2, 4)
    assert (zero.rank, zero.width, zero.bytes, zero.rank_for(0.5)) == (0, 4, 0, 0)
    assert torch.equal(zero.dense(), torch.zeros(2, 4, 4))
    assert zero.complaint() is None
    assert zero.malformed() is None
    assert zero.energy.tolist() == []
    assert Spectrum(torch.zeros(1, 2), torch.eye(2).unsqueeze(0)).rank_for(0.5) == 0


def test_energy_is_the_share_of_the_trace() -> None:
    one = Spectrum(torch.tensor([[3.0, 1.0], [2.0, 0.0]]), torch.eye(2).expand(2, 2, 2))
    torch.testing.assert_close(one.energy, torch.tensor([5 / 6, 1.0]).double())
    assert [one.rank_for(share) for share in (0.5, 5 / 6, 0.9, 1.0)] == [1, 1, 2, 2]
    flat = Spectrum(torch.ones(1, 10), torch.eye(10).unsqueeze(0))
    assert [flat.rank_for(k / 10) for k in range(1, 11)] == list(range(1, 11))
    padded = Spectrum(torch.tensor([[1.0, 0.0]]), torch.eye(2).unsqueeze(0))
    assert (padded.rank_for(0.999), padded.rank_for(1)) == (1, 2)


def test_size_width_groups_and_other_eigenvalues() -> None:
    one = made()
    assert (one.rank, one.width, one.bytes) == (5, 5, (2 * 5 + 2 * 25) * 8)
    swapped = one.permuted(torch.tensor([1, 0]))
    torch.testing.assert_close(swapped.dense(), one.dense().flip(0))
    torch.testing.assert_close(one.map(torch.sqrt).dense() @ one.map(torch.sqrt).dense(), one.dense())
    assert one.cut(5) is one


def test_another_dtype_is_for_the_basis_alone() -> None:
    one = made()
    low = one.to(dtype=torch.float32)
    assert (low.values.dtype, low.basis.dtype) == (torch.float64, torch.float32)
    assert low.dense().dtype == torch.float32
    assert low.total().matrix.dtype == torch.float64
    assert one.after(torch.ones(2, 3, 5)).dtype == torch.float32
    turned = Spectrum(one.values, one.basis.mT.contiguous().mT)
    assert not turned.basis.is_contiguous()
    assert turned.to().basis.is_contiguous()


def test_the_projector_has_eigenvalues_between_zero_and_one() -> None:
    one = projector(Spectrum(torch.tensor([[3.0, 1.0]]), torch.eye(2).unsqueeze(0)), 1.0)
    assert one.values.tolist() == [[0.75, 0.5]]


@pytest.mark.parametrize(
    ("values", "basis", "words"),
    [
        (torch.ones(2), torch.eye(2), r"by eigenvalues \[groups, rank\], got shape \(2,\)"),
        (torch.ones(1, 2), torch.eye(2), r"eigenvectors .* to its eigenvalues \(1, 2\), got \(2, 2\)"),
        (torch.ones(1, 2), torch.eye(3).unsqueeze(0), r"got \(1, 3, 3\)"),
        (torch.ones(2, 3), torch.eye(3).unsqueeze(0), r"got \(1, 3, 3\)"),
        (torch.ones(1, 2), torch.full((1, 2, 2), torch.nan), "finite, got NaN"),
        (torch.tensor([[1.0, torch.inf]]), torch.eye(2).unsqueeze(0), "finite, got NaN"),
        (torch.tensor([[1.0, -1.0]]), torch.eye(2).unsqueeze(0), "semidefinite, got the eigenvalue -1"),
        (torch.tensor([[2.0, 1.0]]), torch.eye(2).unsqueeze(0), r"in \[0, 1\], got 2"),
        (torch.tensor([[1.0, 0.5]]), torch.tensor([[[1.0, 0.1], [0.0, 1.0]]]), "orthonormal eigenvectors, got UᵀU off"),
        (torch.tensor([[1.0]]), torch.tensor([[[1.02], [0.0]]]), "orthonormal eigenvectors"),
    ],
)
def test_what_is_wrong_with_a_spectrum_is_said(values: Tensor, basis: Tensor, words: str) -> None:
    one = Spectrum(values, basis)
    assert re.search(words, str(one.malformed() or one.complaint(largest=1.0)))


def test_what_is_right_is_not_complained_about() -> None:
    near = torch.eye(2).unsqueeze(0) * 1.001
    assert Spectrum(torch.tensor([[1.0, 0.5]]), near).complaint(1.0) is None
    # A direction of eigenvalue 0 may be anything.
    assert Spectrum(torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 5.0], [0.0, 5.0]]])).complaint(1.0) is None


def with_rest(rank: int = 2) -> tuple[Spectrum, Spectrum]:
    """A matrix, and the same cut to a rank with the mean of the other eigenvalues."""
    return made(), made().cut(rank, keep_rest=True)


def test_a_rest_is_the_mean_of_the_eigenvalues_that_were_cut() -> None:
    whole, cut = with_rest()
    assert cut.rest is not None
    torch.testing.assert_close(cut.rest, whole.values[:, 2:].mean(-1))
    torch.testing.assert_close(cut.trace, whole.trace)
    torch.testing.assert_close(cut.dense().diagonal(dim1=-2, dim2=-1).sum(-1), whole.trace)
    again = cut.cut(1, keep_rest=True)
    assert again.rest is not None
    torch.testing.assert_close(again.rest, whole.values[:, 1:].mean(-1))
    torch.testing.assert_close(again.dense(), whole.cut(1, keep_rest=True).dense())
    assert cut.cut(2, keep_rest=True) is cut
    assert cut.cut(2).rest is None is cut.cut(1).rest is whole.cut(5, keep_rest=True).rest
    assert cut.bytes == whole.cut(2).bytes + 2 * 8
    assert cut.known
    assert whole.cut(0, keep_rest=True).known
    assert not whole.cut(0).known


def test_all_that_is_done_with_a_matrix_reads_its_rest() -> None:
    _, cut = with_rest()
    assert cut.rest is not None
    t, identity = cut.rest[:, None, None], torch.eye(5, dtype=torch.float64)
    held = (cut.basis * cut.values.unsqueeze(-2)) @ cut.basis.mT
    expected = held + t * (identity - cut.basis @ cut.basis.mT)
    M = torch.randn(2, 3, 5, generator=rng(3), dtype=torch.float64)
    torch.testing.assert_close(cut.dense(), expected)
    torch.testing.assert_close(cut.total().matrix, expected)
    torch.testing.assert_close(cut.after(M), M @ expected)
    torch.testing.assert_close(cut.scaled(2.0).dense(), 2 * expected)
    torch.testing.assert_close(cut.map(torch.sqrt).dense() @ cut.map(torch.sqrt).dense(), expected)
    torch.testing.assert_close(cut.permuted(torch.tensor([1, 0])).dense(), expected.flip(0))
    torch.testing.assert_close(projector(cut, 0.5).dense(), expected @ torch.linalg.inv(expected + 0.5 * identity))
    torch.testing.assert_close(cut.held().dense(), held)
    low = cut.to(dtype=torch.bfloat16)
    assert low.rest is not None
    assert low.rest.dtype == torch.float64
    torch.testing.assert_close(low.dense().double(), expected, rtol=0.05, atol=0.1)
    full = cut.completed()
    assert (full.rank, full.rest, full.complaint()) == (5, None, None)
    torch.testing.assert_close(full.dense(), expected)
    assert full.completed() is full


def test_what_is_wrong_with_a_rest_is_said() -> None:
    values, basis = torch.ones(1, 1), torch.eye(2)[:, :1].unsqueeze(0)

    def said(rest: Tensor) -> str:
        one = Spectrum(values, basis, rest)
        return str(one.malformed() or one.complaint(largest=1.0))

    assert said(torch.tensor([0.5])) == "None"
    assert said(torch.tensor([-0.5])) == "positive semidefinite, got the eigenvalue -0.5"
    assert said(torch.tensor([torch.nan])) == "finite, got NaN or infinity"
    assert said(torch.tensor([2.0])) == "of eigenvalues in [0, 1], got 2"
    assert said(torch.ones(2)) == "given with one rest for each of its 1 group(s), got shape (2,)"
    # Beside a rest every direction matters, also one of eigenvalue 0.
    skew = torch.tensor([[[1.0, 5.0], [0.0, 5.0]]])
    assert Spectrum(torch.tensor([[1.0, 0.0]]), skew).complaint() is None
    assert "orthonormal" in str(Spectrum(torch.tensor([[1.0, 0.0]]), skew, torch.tensor([0.1])).complaint())
    assert Spectrum(torch.zeros(1, 0), torch.zeros(1, 2, 0), torch.tensor([-1.0])).complaint() is not None
