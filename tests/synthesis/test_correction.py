"""Corrected features: M by its formula and in exact cases, and features that have the uploaded moments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maecho.linalg.gaussians import Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.synthesis.correction import MAP_DRAWS, MAP_RIDGE, Correction
from maecho.synthesis.pseudo import PseudoInputs
from support.clients import rng

INPUTS, FEATURES = 5, 4


def gaussians(d: int, seed: int, classes: tuple[int, ...] = (0, 3)) -> Gaussians:
    X = torch.randn(len(classes), 3 * d, d, generator=rng(seed), dtype=torch.float64)
    return Gaussians(
        classes=torch.tensor(classes),
        counts=torch.tensor([30] * len(classes)),
        means=4 * torch.randn(len(classes), d, generator=rng(seed + 1), dtype=torch.float64),
        covariances=tuple(Spectrum.of_dense((x.T @ x / len(x)).unsqueeze(0)) for x in X),
        shape=(d,),
    )


def network(weight: Tensor) -> nn.Sequential:
    """Features are a linear map of the inputs; the head shows them as they are."""
    first, head = nn.Linear(INPUTS, len(weight), bias=False), nn.Linear(len(weight), len(weight), bias=False)
    one = nn.Sequential(first, head).double()
    with torch.no_grad():
        first.weight.copy_(weight)
        head.weight.copy_(torch.eye(len(weight)))
    return one


def corrected(ridge: float = 1e-9, draws: int = 200, **options: Tensor) -> Correction:
    inputs = PseudoInputs(gaussians(INPUTS, 1), draws, 64, dtype=torch.float64)
    return Correction(inputs, "1", gaussians(FEATURES, 5), 7, ridge, **options)


def weights(seed: int) -> Tensor:
    return torch.randn(FEATURES, INPUTS, generator=rng(seed), dtype=torch.float64)


def test_networks_that_agree_have_the_identity() -> None:
    own = network(weights(1))
    torch.testing.assert_close(corrected().fit_map(own, own), torch.eye(FEATURES).double())


def test_a_linear_map_between_features_is_found() -> None:
    """h = A f exactly, so M = A without a ridge."""
    A = torch.randn(FEATURES, FEATURES, generator=rng(2), dtype=torch.float64)
    W = weights(1)
    torch.testing.assert_close(corrected().fit_map(network(W), network(A @ W)), A, rtol=1e-6, atol=1e-6)


def test_the_map_is_its_formula() -> None:
    one, own, merged = corrected(ridge=0.8), network(weights(1)), network(weights(2))
    x = torch.cat([batch for batch, _ in PseudoInputs(gaussians(INPUTS, 1), 4 * 200, 64, dtype=torch.float64)])
    f, h = x @ weights(1).T, x @ weights(2).T
    f, h = f - f.mean(0), h - h.mean(0)
    F, HF = f.T @ f, h.T @ f
    D = torch.diag(HF.diagonal() / F.diagonal())
    ridge = 0.1 * 0.8 * FEATURES / len(x) * F.trace()
    expected = D + (HF - D @ F) @ torch.linalg.inv(F + ridge * torch.eye(FEATURES).double())
    torch.testing.assert_close(one.fit_map(own, merged), expected)
    assert (MAP_DRAWS, MAP_RIDGE) == (4, 0.1)


def test_a_feature_that_never_varies_maps_to_itself() -> None:
    W = weights(1)
    W[2] = 0
    found = corrected(ridge=0.1).fit_map(network(W), network(weights(2)))
    assert found.isfinite().all()
    assert float(found[2, 2]) == 1
    assert not found[[0, 1, 3], 2].any()


def features(one: Correction, own: nn.Module, merged: nn.Module) -> dict[int, tuple[Tensor, Tensor]]:
    """For each class, what both networks give out."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    with one.applied(own, merged), torch.no_grad():
        for x, labels in one:
            assert labels is not None
            found.setdefault(int(labels[0]), []).append((own(x), merged(x)))
    return {label: tuple(torch.cat(part) for part in zip(*pairs, strict=True)) for label, pairs in found.items()}  # type: ignore[misc]


def test_features_of_each_class_have_the_uploaded_moments() -> None:
    uploaded = gaussians(FEATURES, 5)
    found = features(corrected(draws=60_000), network(weights(1)), network(weights(1)))
    for k, label in enumerate((0, 3)):
        own, merged = found[label]
        torch.testing.assert_close(merged, own)
        torch.testing.assert_close(own.mean(0), uploaded.means[k], rtol=0, atol=0.05)
        torch.testing.assert_close(own.T.cov(), uploaded.covariances[k].dense()[0], rtol=0, atol=0.08)


def test_the_merged_network_moves_by_the_map_of_the_difference() -> None:
    M = torch.randn(FEATURES, FEATURES, generator=rng(8), dtype=torch.float64)
    one, own, merged = corrected(feature_map=M), network(weights(1)), network(weights(2))
    plain = {int(labels[0]): x for x, labels in one._inputs if labels is not None}
    changed = features(one, own, merged)
    for label, x in plain.items():
        last = slice(-len(x), None)
        f, h = own(x), merged(x)
        torch.testing.assert_close(changed[label][1][last], h + (changed[label][0][last] - f) @ M.T)
    assert one.feature_map is M


def test_every_pass_is_the_same_and_nothing_stays_behind() -> None:
    one, own, merged = corrected(), network(weights(1)), network(weights(2))
    first, again = features(one, own, merged), features(one, own, merged)
    for label, pair in first.items():
        assert all(torch.equal(x, y) for x, y in zip(pair, again[label], strict=True))
    x = torch.ones(2, INPUTS).double()
    torch.testing.assert_close(own(x), x @ weights(1).T)
    torch.testing.assert_close(merged(x), x @ weights(2).T)
    assert len(one) == len(one._inputs)


def test_the_seed_of_features_is_its_own() -> None:
    own = network(weights(1))
    one = corrected(feature_map=torch.eye(FEATURES).double())
    other = Correction(one._inputs, "1", gaussians(FEATURES, 5), 8, 0.1, torch.eye(FEATURES).double())
    assert not torch.equal(features(one, own, own)[0][0], features(other, own, own)[0][0])
