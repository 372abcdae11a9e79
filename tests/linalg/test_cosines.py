"""The cosine transform: SciPy's, undone by its inverse, and its variances those of a full covariance matrix."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.fft import dctn

from maecho.linalg import cosines
from support.clients import rng

SHAPES = [(1,), (5,), (8,), (3, 4), (2, 3, 5)]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_rows_are_orthonormal_and_the_first_is_constant(n: int) -> None:
    C = cosines.matrix(n)
    torch.testing.assert_close(C @ C.T, torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(C[0], torch.full((n,), 1 / math.sqrt(n), dtype=torch.float64))


def test_a_row_of_the_matrix_changes_sign_as_often_as_its_number() -> None:
    C = cosines.matrix(7)
    assert [int((row[1:].sign() != row[:-1].sign()).sum()) for row in C[[0, 1, 3]]] == [0, 1, 3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forth_is_scipys_and_back_undoes_it(shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, math.prod(shape), generator=rng(), dtype=torch.float64)
    y = cosines.forth(x, shape)
    expected = dctn(x.reshape(2, 3, *shape).numpy(), axes=range(2, 2 + len(shape)), norm="ortho")
    torch.testing.assert_close(y, torch.from_numpy(expected).reshape(x.shape))
    torch.testing.assert_close(cosines.back(y, shape), x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_variances_are_the_diagonal_of_the_covariance_of_entries(shape: tuple[int, ...]) -> None:
    d = math.prod(shape)
    of_cosines = torch.rand(2, d, generator=rng(), dtype=torch.float64)
    B = cosines.forth(torch.eye(d, dtype=torch.float64), shape)  # row i: the cosines of the i-th unit vector
    expected = torch.stack([torch.diag(B @ torch.diag(v) @ B.T) for v in of_cosines])
    torch.testing.assert_close(cosines.variances(of_cosines, shape), expected)


def test_float32_stays_float32() -> None:
    x = torch.randn(2, 12, generator=rng())
    for transform in (cosines.forth, cosines.back, cosines.variances):
        assert transform(x, (3, 4)).dtype == torch.float32
