"""Gaussians of examples: what a cut keeps, sums that are those of all data together, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.gaussians import Gaussians, nearer_to_diagonal
from maecho.linalg.spectra import Spectrum
from support.clients import rng


def of_rows(rows: Mapping[int, Tensor], shape: tuple[int, ...]) -> Gaussians:
    """The Gaussian of every class, by the definitions of mean and covariance."""
    labels = sorted(rows)
    covariances = [rows[label].T.cov(correction=0).reshape(1, *2 * [rows[label].shape[1]]) for label in labels]
    return Gaussians(
        classes=torch.tensor(labels),
        counts=torch.tensor([len(rows[label]) for label in labels]),
        means=torch.stack([rows[label].mean(0) for label in labels]),
        covariances=tuple(Spectrum.of_dense(covariance) for covariance in covariances),
        shape=shape,
    )


def rows(n: int, d: int = 6, seed: int = 0) -> Tensor:
    draw = rng(seed)
    mixed = torch.randn(n, d, generator=draw, dtype=torch.float64) @ torch.randn(d, d, generator=draw).double()
    return mixed + torch.randn(d, generator=draw)


def made(shape: tuple[int, ...] = (6,)) -> Gaussians:
    return of_rows({0: rows(9), 2: rows(4, seed=1), 7: rows(1, seed=2)}, shape)


def shared(gaussians: Gaussians) -> Gaussians:
    return replace(gaussians, covariances=gaussians.covariances[:1])


def assert_same(one: Gaussians, other: Gaussians) -> None:
    assert (one.shape, one.in_cosines) == (other.shape, other.in_cosines)
    for name in ("classes", "counts", "means", "residual"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
    for mine, theirs in zip(one.covariances, other.covariances, strict=True):
        torch.testing.assert_close(mine.dense(), theirs.dense())


def test_a_class_of_few_examples_has_few_directions() -> None:
    assert [covariance.rank for covariance in made().covariances] == [6, 3, 0]


def test_variances_are_those_of_the_rows() -> None:
    expected = torch.stack([rows(9).var(0, correction=0), rows(4, seed=1).var(0, correction=0), torch.zeros(6)])
    torch.testing.assert_close(made().variances, expected.double())
    assert replace(made(), means=made().means.float()).variances.dtype == torch.float64


def test_the_residual_is_added_to_the_variances_in_its_own_coordinates() -> None:
    residual = torch.rand(3, 6, generator=rng(), dtype=torch.float64)
    held = made((2, 3)).variances
    entries = replace(made((2, 3)), residual=residual)
    torch.testing.assert_close(entries.variances, held + residual)
    expected = held + cosines.variances(residual, (2, 3))
    torch.testing.assert_close(replace(entries, in_cosines=True).variances, expected)


def test_bytes_count_every_tensor_and_eight_for_each_rank() -> None:
    one = shared(made())
    plain = 3 * 8 + 3 * 8 + 3 * 6 * 8
    assert one.bytes == plain + 8 + (6 + 6 * 6) * 8
    assert one.residual_bytes == 6 * 8
    assert made().residual_bytes == 3 * 6 * 8
    with_residual = replace(one, residual=torch.zeros(1, 6))
    assert with_residual.bytes == one.bytes + 6 * 4
    assert with_residual.residual_bytes == 0


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_a_cut_keeps_the_leading_directions_and_all_variances(shape: tuple[int, ...]) -> None:
    whole = made(shape)
    cut = whole.cut(lambda spectrum: spectrum.rank // 2)
    assert [covariance.rank for covariance in cut.covariances] == [3, 1, 0]
    torch.testing.assert_close(cut.covariances[0].dense(), whole.covariances[0].cut(3).dense())
    torch.testing.assert_close(cut.variances.sum(-1), whole.variances.sum(-1))
    if not cut.in_cosines:
        torch.testing.assert_close(cut.variances, whole.variances)


def test_a_second_cut_adds_to_the_residual() -> None:
    whole = made()
    again = whole.cut(lambda _: 4).cut(lambda _: 1)
    torch.testing.assert_close(again.variances, whole.variances)
    assert_same(again, whole.cut(lambda _: 1))


def test_a_cut_without_variances_has_no_residual() -> None:
    whole = made()
    cut = whole.cut(lambda _: 1, keep_variances=False)
    assert cut.residual is None
    assert [covariance.rank for covariance in cut.covariances] == [1, 1, 0]


def test_a_cut_that_cuts_nothing_gives_the_same_object() -> None:
    whole = made()
    assert whole.cut(lambda _: 6) is whole
    assert whole.cut(lambda _: 6, keep_variances=False) is whole


def test_of_smooth_images_the_residual_is_in_cosines_and_of_noise_in_entries() -> None:
    shape = (4, 4)
    spread = torch.linspace(4, 0.1, 16, dtype=torch.float64)
    noise = torch.randn(200, 16, generator=rng(), dtype=torch.float64) * spread
    for images, in_cosines in ((noise, False), (cosines.back(noise, shape), True)):
        whole = of_rows({0: images}, shape)
        cut = whole.cut(lambda _: 1)
        assert cut.in_cosines is in_cosines
        again = cut.cut(lambda _: 0)
        assert again.in_cosines is in_cosines, "another cut stays in the same coordinates"
        for one in (cut, again):
            lost = whole.covariances[0].dense()[0] - one.covariances[0].dense()[0]
            if in_cosines:
                lost = cosines.forth(cosines.forth(lost, shape).T, shape)
            assert one.residual is not None
            torch.testing.assert_close(one.residual[0], lost.diagonal())


def test_where_both_coordinates_are_as_good_entries_are_kept() -> None:
    entries, other = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]])
    assert nearer_to_diagonal(entries, other) == (entries, False)
    larger = torch.tensor([[0.0, 3.0]])
    assert nearer_to_diagonal(entries, larger) == (larger, True)


def test_the_sum_of_two_clients_is_of_their_data_together() -> None:
    first, second = {0: rows(9), 2: rows(4, seed=1)}, {2: rows(8, seed=3), 5: rows(7, seed=4)}
    together = of_rows({**first, **second, 2: torch.cat([first[2], second[2]])}, (2, 3))
    assert_same(of_rows(first, (2, 3)).plus(of_rows(second, (2, 3))), together)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (shared(made()), "got 3 Gaussians of 3 classes with 1 covariances"),
        (made().cut(lambda _: 1), "got 3 Gaussians of 3 classes with a residual"),
        (replace(made(), classes=torch.tensor([0, 2, 2])), "got 3 Gaussians of 2 classes with 3 covariances"),
    ],
)
def test_moments_that_cannot_be_added_are_refused(one: Gaussians, words: str) -> None:
    for pair in ((one, made()), (made(), one)):
        with pytest.raises(ValueError, match=words):
            pair[0].plus(pair[1])


def test_another_dtype_is_for_all_but_classes_counts_and_eigenvalues() -> None:
    whole = made().cut(lambda _: 2)
    half = whole.to(dtype=torch.float32)
    assert half.residual is not None
    assert {half.means.dtype, half.residual.dtype, half.covariances[0].basis.dtype} == {torch.float32}
    assert (half.classes.dtype, half.counts.dtype) == (torch.int64, torch.int64)
    assert half.covariances[0].values.dtype == torch.float64
    torch.testing.assert_close(half.means, whole.means.float())
    assert made().to(dtype=torch.float32).residual is None


@pytest.mark.parametrize("in_cosines", [False, True])
def test_tensors_are_read_back(in_cosines: bool) -> None:
    for one in (made((2, 3)), shared(made((2, 3))).cut(lambda _: 2), replace(made(), shape=(2, 3))):
        one = replace(one, in_cosines=in_cosines and one.residual is not None)
        assert_same(Gaussians.read(one.tensors(), {"shape": [2, 3]}), one)
    assert Gaussians.read(made().tensors(), {}).shape == (6,)


def test_tensors_have_the_names_of_files() -> None:
    found = made().tensors()
    assert list(found) == ["classes", "counts", "means", "covariances/ranks", "covariances/values", "covariances/basis"]
    assert found["covariances/ranks"].tolist() == [6, 3, 0]
    assert found["covariances/basis"].shape == (6, 9)
    residual = replace(made((2, 3)), residual=torch.zeros(3, 6))
    assert list(residual.tensors())[-1] == "residual"
    assert list(replace(residual, in_cosines=True).tensors())[-1] == "residual_of_cosines"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks": torch.tensor([6, 2, 0])}, "got ranks 8, 9 eigenvalues"),
        ({"ranks": torch.tensor([6, 4, -1])}, "must sum to their eigenvalues"),
        ({"ranks": torch.tensor([[6, 3, 0]])}, r"one row of ranks, .* got \[1, 3\], \[9\] and \[6, 9\]"),
        ({"ranks": torch.tensor([6.0, 3, 0])}, "one row of ranks"),
        ({"values": torch.ones(3, 3)}, r"got \[3\], \[3, 3\] and \[6, 9\]"),
        ({"values": torch.ones(8)}, "got ranks 9, 8 eigenvalues"),
        ({"basis": torch.ones(9)}, r"got \[3\], \[9\] and \[9\]"),
        ({"basis": torch.ones(6, 8)}, r"vectors \[6, 8\]"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(changed: dict[str, Tensor], words: str) -> None:
    tensors = made().tensors() | {f"covariances/{name}": tensor for name, tensor in changed.items()}
    with pytest.raises(ValueError, match=words):
        Gaussians.read(tensors, {})


WIDE = Spectrum.of_dense(torch.eye(7, dtype=torch.float64).unsqueeze(0))
GROUPED = Spectrum.of_dense(torch.eye(6, dtype=torch.float64).expand(2, 6, 6))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"means": torch.zeros(18)}, r"class means must be \[classes, inputs\], got shape \(18,\)"),
        ({"classes": torch.zeros(3, 1)}, "class means must be"),
        ({"counts": torch.zeros(3, 1)}, "class means must be"),
        ({"classes": torch.tensor([0, 1])}, "got 2, 3, 3 and 3"),
        ({"counts": torch.tensor([1, 1])}, "got 3, 2, 3 and 3"),
        ({"covariances": made().covariances[:2]}, "got 3, 3, 3 and 2"),
        ({"covariances": (WIDE,)}, r"of inputs of shape \(6,\), got means of length 6"),
        ({"shape": (2, 4)}, r"of inputs of shape \(2, 4\), got means of length 6"),
        ({"residual": torch.zeros(1, 6)}, r"must have shape \(3, 6\), got \(1, 6\)"),
        ({"covariances": (GROUPED,)}, "one matrix each, given by directions"),
        ({"covariances": (Spectrum(torch.ones(6), torch.eye(6)),)}, "class covariances must be given by eigenvalues"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(made(), **changed)


def test_a_cut_without_variances_drops_a_residual_that_was_there() -> None:
    once = made().cut(lambda _: 4)
    assert once.residual is not None
    for rank in (1, 6):
        assert once.cut(lambda _, rank=rank: rank, keep_variances=False).residual is None


def test_a_covariance_has_a_residual_and_no_rest() -> None:
    one = made()
    covariances = tuple(c.cut(1, keep_rest=True) for c in one.covariances)
    with pytest.raises(ValueError, match="class covariances must be one matrix each, given by directions"):
        replace(one, covariances=covariances)
