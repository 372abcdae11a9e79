"""Dense and diagonal matrices give the same answers, and no operation fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import TOLERANCE, Dense, Diagonal, add_into, eigenvalues
from maecho.statistics import parts
from support.clients import rng


def test_a_diagonal_is_one_row_and_acts_like_its_matrix() -> None:
    d = torch.tensor([[3.0, 0.0, 1.0]], dtype=torch.float64)
    diagonal, M = Diagonal(d), torch.randn(1, 2, 3, generator=rng(), dtype=torch.float64)
    torch.testing.assert_close(diagonal.after(M), M @ diagonal.dense())
    torch.testing.assert_close(diagonal.total().after(M), M @ diagonal.dense())
    assert parts.MATRICES.cut(diagonal, lambda _: 1) is diagonal  # nothing of it can be cut
    assert float(diagonal.total().mean_eigenvalue) == pytest.approx(4 / 3)
    torch.testing.assert_close(diagonal.total().divide(M), M @ torch.linalg.pinv(diagonal.dense()))


def test_a_total_is_memory_of_its_own() -> None:
    values = torch.ones(1, 3, dtype=torch.float64)
    Diagonal(values).total().add_(Diagonal(values.clone()))
    assert float(values.sum()) == 3
    spectrum = Spectrum(values, torch.eye(3, dtype=torch.float64).unsqueeze(0))
    spectrum.total().add_(Dense(torch.ones(1, 3, 3, dtype=torch.float64)))
    torch.testing.assert_close(spectrum.dense()[0], torch.eye(3, dtype=torch.float64))


def test_divide_solves_and_never_fails_on_a_singular_total(gram: Tensor) -> None:
    B = torch.randn(1, 3, gram.shape[-1], generator=rng(), dtype=torch.float64) @ gram
    solved = Dense(gram).divide(B)
    assert solved.isfinite().all()
    torch.testing.assert_close(solved @ gram, B, rtol=1e-5, atol=1e-6 * float(gram.abs().max()))


@pytest.mark.parametrize("amount", [2.0, torch.tensor([[[2.0]], [[0.5]]])])
def test_both_forms_do_the_same(amount: float | Tensor) -> None:
    row = torch.tensor([[3.0, 1.0], [0.5, 4.0]])
    M = torch.randn(2, 3, 2, generator=rng())
    one, other = Diagonal(row), Dense(torch.diag_embed(row))
    for changed, same in (
        (one.plus_identity(amount), other.plus_identity(amount)),
        (one.scaled(amount), other.scaled(amount)),
        (one.plus(one), other.plus(other)),
        (one.shrunk(0.3), other.shrunk(0.3)),
    ):
        torch.testing.assert_close(torch.diag_embed(changed.values), same.matrix)
    for name in ("after", "solve", "divide"):
        torch.testing.assert_close(getattr(one, name)(M), getattr(other, name)(M))
    torch.testing.assert_close(one.mean_eigenvalue, other.mean_eigenvalue)
    assert one.known
    assert other.known
    assert not Diagonal.zero(1, 2).known
    assert not Dense(torch.zeros(1, 2, 2)).known


def test_only_entries_off_the_diagonal_shrink() -> None:
    A = Dense(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]))
    torch.testing.assert_close(A.shrunk(0.5).matrix, torch.tensor([[[2.0, 0.5], [0.5, 3.0]]]))


def test_eigenvalues_are_those_of_the_nearest_semidefinite_matrix() -> None:
    A = torch.tensor([[[2.0, 0.0], [0.0, -1.0]]])
    s, U = eigenvalues(A)
    torch.testing.assert_close((U * s.unsqueeze(-2)) @ U.mT, torch.diag_embed(torch.tensor([[2.0, 0.0]])))


def test_what_is_added_into_a_dictionary_is_summed_by_key() -> None:
    totals: dict[str, Tensor] = {}
    for key, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        add_into(totals, key, torch.full((2,), value))
    assert {key: total.tolist() for key, total in totals.items()} == {"a": [4.0, 4.0], "b": [2.0, 2.0]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.ones(3), r"\[groups, inputs\], got shape \(3,\)"),
        (torch.tensor([[1.0, -2.0]]), "positive semidefinite, got the eigenvalue -2"),
        (torch.tensor([[1.0, float("inf")]]), "finite, got NaN or infinity"),
        (torch.tensor([[1.0, 1.5]]), r"\[0, 1\], got 1.5"),
    ],
)
def test_what_is_wrong_with_a_diagonal_is_said(values: Tensor, words: str) -> None:
    import re

    diagonal = Diagonal(values)
    assert re.search(words, str(diagonal.malformed() or diagonal.complaint(largest=1.0)))


def test_a_pivot_of_round_off_is_not_divided_by() -> None:
    """Cholesky goes through here, with a pivot that is no more than round-off of the larger one."""
    A = torch.diag(torch.tensor([1.0, 1e-16], dtype=torch.float64)).unsqueeze(0)
    assert not torch.linalg.cholesky_ex(A)[1].any()
    B = torch.ones(1, 1, 2, dtype=torch.float64)
    torch.testing.assert_close(Dense(A).divide(B), torch.tensor([[[1.0, 0]]], dtype=torch.float64))


def test_a_diagonal_stays_in_float64() -> None:
    """Counts above 2**24 are whole in float64 and not in float32."""
    counts = Diagonal(torch.tensor([[2.0**24 + 1, 3]], dtype=torch.float64))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(counts.to(dtype=dtype).values, counts.values)
        assert counts.to(dtype=dtype).values.dtype == torch.float64


def both(values: Tensor) -> tuple[Diagonal, Dense]:
    return Diagonal(values), Dense(torch.diag_embed(values))


def test_the_ridge_is_its_formula_in_both_forms() -> None:
    """ε = share · (d / rows) · trace."""
    values = torch.tensor([[3.0, 1.0, 2.0], [0.5, 4.0, 0.0]])
    for one in both(values):
        assert one.width == 3
        torch.testing.assert_close(one.mean_eigenvalue, torch.tensor([[[2.0]], [[1.5]]]))
        torch.testing.assert_close(one.ridge(0.1, 30), 0.1 * 3 / 30 * torch.tensor([[[6.0]], [[4.5]]]))


def test_adding_in_place_changes_the_first_and_no_other() -> None:
    for one, other in zip(both(torch.tensor([[1.0, 2.0]])), both(torch.tensor([[10.0, 20.0]])), strict=True):
        M = torch.eye(2).unsqueeze(0)
        summed, scaled, lifted = one.plus(other), one.scaled(3), one.plus_identity()
        assert one.add_(other) is one
        for found, expected in ((one, [11.0, 22]), (other, [10.0, 20]), (summed, [11.0, 22]), (scaled, [3.0, 6])):
            assert found.after(M)[0].diagonal().tolist() == expected
        assert lifted.after(M)[0].diagonal().tolist() == [2, 3]
    totals: dict[str, Tensor] = {}
    first = torch.ones(2)
    add_into(totals, "a", first)
    add_into(totals, "a", torch.ones(2))
    assert totals["a"] is first
    assert first.tolist() == [2, 2]


def test_a_product_with_a_diagonal_has_the_dtype_of_the_other_factor() -> None:
    one = Diagonal(torch.tensor([[2.0, 3.0]], dtype=torch.float64))
    assert one.after(torch.ones(1, 4, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    "matrix", [[[2.0, 1.0], [1.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]], ids=str
)
def test_division_is_the_pseudoinverse_and_solving_the_inverse(matrix: list[list[float]]) -> None:
    A = torch.tensor([matrix, [[5.0, 2.0], [2.0, 1.0]]], dtype=torch.float64)
    B = torch.randn(2, 3, 2, generator=rng(), dtype=torch.float64)
    torch.testing.assert_close(Dense(A).divide(B), B @ torch.linalg.pinv(A, hermitian=True))
    torch.testing.assert_close(Dense(A[1:]).solve(B[1:]), B[1:] @ torch.linalg.inv(A[1:]))
    diagonal = Diagonal(torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
    torch.testing.assert_close(diagonal.divide(B), B @ torch.linalg.pinv(diagonal.dense(), hermitian=True))
    full = diagonal.plus_identity()
    torch.testing.assert_close(full.solve(B), B @ torch.linalg.inv(full.dense()))


@pytest.mark.parametrize(("small", "divided"), [(1e-10, 1e10), (1e-17, 0.0)])
def test_only_an_eigenvalue_of_round_off_counts_as_zero(small: float, divided: float) -> None:
    A = torch.diag(torch.tensor([1.0, small], dtype=torch.float64)).unsqueeze(0)
    found = Dense(A).divide(torch.ones(1, 1, 2, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([[[1.0, divided]]], dtype=torch.float64))


def test_round_off_grows_with_the_width_of_the_matrix() -> None:
    """1e-15 is below 8 times the round-off of 1, and above twice it."""
    for width, divided in ((8, 0.0), (2, 1e15)):
        A = torch.diag(torch.tensor([1.0] * (width - 1) + [1e-15], dtype=torch.float64)).expand(3, -1, -1)
        found = Dense(A).divide(torch.ones(3, 1, width, dtype=torch.float64))
        torch.testing.assert_close(found[..., -1], torch.full((3, 1), divided, dtype=torch.float64))


def test_shrinking_by_one_changes_nothing_and_by_zero_leaves_the_diagonal() -> None:
    A = Dense(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]))
    assert A.shrunk(1) is A
    assert torch.equal(A.shrunk(0).matrix, torch.tensor([[[2.0, 0.0], [0.0, 3.0]]]))


def test_a_diagonal_has_a_rank_a_size_and_groups_in_an_order() -> None:
    one = Diagonal(torch.tensor([[3.0, 1.0, 2.0], [0.5, 4.0, 0.0]]))
    assert (one.rank, one.width, one.bytes) == (3, 3, 24)
    assert one.permuted(torch.tensor([1, 0])).values.tolist() == [[0.5, 4.0, 0.0], [3.0, 1.0, 2.0]]
    assert one.map(lambda s: 2 * s).values.tolist() == [[6.0, 2.0, 4.0], [1.0, 8.0, 0.0]]
    assert torch.equal(one.dense(), torch.diag_embed(one.values))
    zero = Diagonal.zero(2, 3)
    assert (zero.values.shape, zero.values.dtype) == ((2, 3), torch.float64)
    assert not zero.values.any()


def test_a_matrix_is_symmetrised_before_its_eigenvalues_are_taken() -> None:
    skew = torch.tensor([[[1.0, 0.5], [0.3, 1.0]]], dtype=torch.float64)
    s, U = eigenvalues(skew)
    torch.testing.assert_close(s, torch.tensor([[0.6, 1.4]], dtype=torch.float64))
    torch.testing.assert_close((U * s.unsqueeze(-2)) @ U.mT, (skew + skew.mT) / 2)


def test_round_off_above_the_largest_eigenvalue_is_allowed() -> None:
    assert TOLERANCE == 1e-3
    one = Diagonal(torch.tensor([[1.0009, 0.0]]))
    assert one.complaint(1.0) is None
    assert one.malformed() is None
    assert Diagonal(torch.tensor([[1.0011]])).complaint(1.0) == "of eigenvalues in [0, 1], got 1"
    assert Diagonal(torch.zeros(1, 0)).complaint(1.0) is None
    assert Diagonal(torch.tensor([[1e30]])).complaint() is None
