"""Drawn inputs: how many of each class, always the same ones, and the moments that were asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.gaussians import NO_CLASS, Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.randomness import seed_of
from maecho.synthesis.pseudo import Noise, PseudoInputs, draw, seed_for
from support.clients import rng


def moments(shape: tuple[int, ...] = (2, 3), counts: tuple[int, ...] = (60, 30, 10), rank: int = 6) -> Gaussians:
    d = torch.Size(shape).numel()
    covariances = []
    for k in range(len(counts)):
        X = torch.randn(2 * d, d, generator=rng(k), dtype=torch.float64)
        covariances.append(Spectrum.of_dense((X.T @ X / len(X)).unsqueeze(0), rank))
    return Gaussians(
        classes=torch.arange(len(counts)) * 2,
        counts=torch.tensor(counts),
        means=torch.randn(len(counts), d, generator=rng(9), dtype=torch.float64) * 3,
        covariances=tuple(covariances),
        shape=shape,
    )


def covariance_of(x: Tensor) -> Tensor:
    return x.flatten(1).double().T.cov(correction=0)


@pytest.mark.parametrize(
    ("draws", "counts", "expected"),
    [(100, (60, 30, 10), [60, 30, 10]), (10, (60, 30, 10), [6, 3, 1]), (5, (98, 1, 1), [5, 1, 1]), (7, (5,), [7])],
)
def test_classes_are_drawn_in_proportion_and_at_least_once(
    draws: int, counts: tuple[int, ...], expected: list[int]
) -> None:
    assert PseudoInputs(moments(counts=counts), draws).counts() == expected


@pytest.mark.parametrize("chunk", [1, 7, 25, 1000])
def test_chunks_are_small_of_nearly_one_size_and_of_one_class(chunk: int) -> None:
    inputs = PseudoInputs(moments(), 100, chunk)
    found = [(len(x), labels) for x, labels in inputs]
    assert len(inputs) == len(found)
    for k, count in enumerate(inputs.counts()):
        sizes = [n for n, labels in found if labels is not None and int(labels[0]) == 2 * k]
        assert sum(sizes) == count
        assert max(sizes) <= chunk
        assert max(sizes) - min(sizes) <= 1
    assert all(labels is not None and len(labels) == n and len(labels.unique()) == 1 for n, labels in found)


def test_every_pass_gives_the_same_inputs_and_another_seed_others() -> None:
    inputs = PseudoInputs(moments(), 40, 16, seed=3)
    first, again = ([x for x, _ in inputs] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    other = next(iter(replace(inputs, seed=4)))[0]
    assert not torch.equal(first[0], other)
    assert not torch.equal(first[0], first[1]), "chunks differ"


def test_inputs_have_the_shape_and_dtype_that_was_asked_for() -> None:
    x, _ = next(iter(PseudoInputs(moments(), 10)))
    assert (tuple(x.shape[1:]), x.dtype) == ((2, 3), torch.float32)
    assert next(iter(PseudoInputs(moments(), 10, dtype=torch.float64)))[0].dtype == torch.float64


def test_without_classes_there_are_no_labels() -> None:
    one = replace(moments(counts=(4,)), classes=torch.tensor([NO_CLASS]))
    assert [labels for _, labels in PseudoInputs(one, 10, 5)] == [None, None]


@pytest.mark.parametrize("shared", [False, True])
def test_draws_have_the_moments_of_their_gaussian(shared: bool) -> None:
    m = moments()
    m = replace(m, covariances=m.covariances[:1]) if shared else m
    for k in range(3):
        x = draw(m, k, 60_000, rng(k), torch.float64).flatten(1)
        torch.testing.assert_close(x.mean(0), m.means[k], rtol=0, atol=0.05)
        expected = m.covariances[0 if shared else k].dense()[0]
        torch.testing.assert_close(covariance_of(x), expected, rtol=0, atol=0.06)


def test_an_eigenvalue_below_zero_counts_as_zero() -> None:
    m = moments(counts=(5,))
    s = m.covariances[0].values.clone()
    s[0, -1] = -1e-9
    found = draw(replace(m, covariances=(Spectrum(s, m.covariances[0].basis),)), 0, 9, rng(), torch.float32)
    assert found.isfinite().all()


@pytest.mark.parametrize("in_cosines", [False, True])
@pytest.mark.parametrize(("noise", "shape"), [("gaussian", (2, 3)), ("leaves", (1, 8, 8)), ("leaves", (2, 3))])
def test_a_residual_adds_its_variances_in_its_coordinates(
    noise: Noise, shape: tuple[int, ...], in_cosines: bool
) -> None:
    d = torch.Size(shape).numel()
    m = moments(shape, (50, 50), rank=2)
    residual = torch.rand(2, d, generator=rng(4), dtype=torch.float64) + 0.5
    m = replace(m, residual=residual, in_cosines=in_cosines)
    for k in range(2):
        x = draw(m, k, 40_000, rng(5), torch.float64, noise).flatten(1) - m.means[k]
        rest = cosines.forth(x, shape) if in_cosines else x
        basis = m.covariances[k].basis[0]
        rows = cosines.forth(basis.mT, shape) if in_cosines else basis.mT
        held = m.covariances[k].values[0] @ rows.square()
        torch.testing.assert_close(rest.var(0), held + residual[k], rtol=0.09, atol=0.02)


def test_every_client_has_a_stream_of_its_own() -> None:
    assert seed_for(1, "ann") == seed_of("1/ann")
    assert len({seed_for(seed, client) for seed in (0, 1) for client in ("ann", "bob")}) == 4
