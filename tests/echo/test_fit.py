"""The fit of one unit from totals: it agrees with least squares, ridge regression and discriminant analysis."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from maecho.echo.fit import DISAGREEING, Regression, disagreement, discriminant, fitted, write
from maecho.echo.totals import ByClass, UnitSums
from maecho.network.layers import Layer
from maecho.network.stages import plan
from maecho.network.units import Unit, network
from support.clients import rng
from support.tiny import refused

LINEAR = Unit(Layer("0", "0.weight"), ("0",))
BIASED = Unit(Layer("0", "0.weight", "0.bias"), ("0",))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=torch.float64)


def totals(H: Tensor, Z: Tensor) -> UnitSums:
    return UnitSums((H.T @ H).unsqueeze(0), (Z.T @ H).unsqueeze(0))


def of_classes(n: int = 300, d: int = 5, bias: bool = True, held: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Any]:
    """Gaussian clouds around a mean for each of four classes. The classes have different numbers of examples."""
    y = torch.tensor(held)[torch.randint(0, len(held), (n,), generator=rng(5)).clamp(max=len(held) - 1)]
    y[: n // 3] = held[0]
    x = randn(n, d, seed=6) @ randn(d, d, seed=7) + 2 * randn(4, d, seed=8)[y]
    H = torch.cat([x, torch.ones(n, 1)], 1) if bias else x
    Y = nn.functional.one_hot(y, 4).double()
    return {"x": x, "y": y, "H": H, "sums": replace(totals(H, Y), by_class=ByClass(Y.T @ H, Y.sum(0)))}


def solved(regression: Regression, unit: Unit, sums: UnitSums, prior: Tensor, is_head: bool = False) -> Tensor:
    """The sums scaled to as many examples as inputs. Then the ridge is a plain share of the trace."""
    return regression.matrix(unit, sums, prior, prior.shape[-1], is_head)


def test_without_a_ridge_it_is_least_squares() -> None:
    H, Z = randn(50, 6), randn(50, 3, seed=1)
    W = solved(Regression(ridge=0), LINEAR, totals(H, Z), randn(1, 3, 6, seed=2))
    torch.testing.assert_close(W[0], torch.linalg.lstsq(H, Z).solution.T)


def test_totals_over_clients_are_the_pooled_problem() -> None:
    H, Z = randn(60, 6), randn(60, 3, seed=1)
    parts = [totals(h, z) for h, z in zip(H.split(17), Z.split(17), strict=True)]
    summed = functools.reduce(UnitSums.add_, parts)
    prior = randn(1, 3, 6, seed=2)
    for ridge in (0.0, 1e-2):
        got, pooled = (solved(Regression(ridge), LINEAR, t, prior) for t in (summed, totals(H, Z)))
        torch.testing.assert_close(got, pooled, rtol=1e-10, atol=1e-10)


def test_more_examples_are_held_less() -> None:
    H, Z = randn(50, 6), randn(50, 3, seed=1)
    sums, prior = totals(H, Z), torch.zeros(1, 3, 6, dtype=torch.float64)
    few, many = (Regression(0.1).matrix(LINEAR, sums, prior, n) for n in (6, 600))
    torch.testing.assert_close(few, solved(Regression(0.1), LINEAR, sums, prior))
    torch.testing.assert_close(many, solved(Regression(0.001), LINEAR, sums, prior))


def test_the_ridge_pulls_to_the_prior() -> None:
    """The gradient of ‖WH − Z‖² + ε‖W − W̄‖² is zero. Here ε is a share of the trace."""
    H, Z, prior = randn(50, 6), randn(50, 3, seed=1), randn(1, 3, 6, seed=2)
    sums = totals(H, Z)
    gaps = []
    for share in (1e-6, 1e-2, 1.0, 1e6):
        W = solved(Regression(share), LINEAR, sums, prior)[0]
        epsilon = share * torch.linalg.eigvalsh(H.T @ H).sum()
        torch.testing.assert_close((W @ H.T - Z.T) @ H, -epsilon * (W - prior[0]))
        gaps.append(float((W - prior[0]).norm()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-4


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_a_singular_total_never_fails(gram: Tensor, ridge: float) -> None:
    """A prior that already explains the outputs stays, whatever the inputs. Without inputs every prior stays."""
    d = gram.shape[-1]
    prior = randn(1, 3, d)
    kept = solved(Regression(ridge), LINEAR, UnitSums(gram, prior @ gram), prior)
    torch.testing.assert_close(kept, prior)
    other = solved(Regression(ridge), LINEAR, UnitSums(gram, randn(1, 3, d, seed=1) @ gram), prior)
    s, U = torch.linalg.eigh(gram[0])
    unseen = U[:, s < 1e-10 * s.max()] if float(s.max()) > 0 else U
    assert other.isfinite().all()
    torch.testing.assert_close(other[0] @ unseen, prior[0] @ unseen, rtol=1e-4, atol=1e-4)


def test_an_embedding_is_fitted_token_by_token() -> None:
    tokens, Z = torch.tensor([0, 0, 1, 3, 3, 3]), randn(6, 2)
    H = nn.functional.one_hot(tokens, 4).double()
    prior, unit = randn(1, 2, 4, seed=1), Unit(Layer("0", "0.weight", transposed=True, one_hot=True), ("0",))
    dense = solved(Regression(0.1), LINEAR, totals(H, Z), prior)
    counted = UnitSums(tokens.bincount(minlength=4).double().reshape(1, 1, 4), (Z.T @ H).unsqueeze(0))
    torch.testing.assert_close(solved(Regression(0.1), unit, counted, prior), dense)
    exact = solved(Regression(0), unit, counted, prior)
    torch.testing.assert_close(exact[0, :, 2], prior[0, :, 2])  # nobody says it
    torch.testing.assert_close(exact[0, :, 3], Z[3:].mean(0))


def test_the_ridge_head_is_that_of_scikit_learn() -> None:
    data = of_classes()
    got = solved(Regression(0.01, "ridge"), BIASED, data["sums"], randn(1, 4, 6), is_head=True)[0]
    # The data and the constant of the bias have a ridge each. For scikit-learn the constant gets another size instead.
    squares = data["sums"].gram[0].diagonal()
    alpha, of_bias = 0.01 * 5**2 / 6 * float(squares[:-1].mean()), 0.01 / 6 * float(squares[-1])
    size = torch.ones(6, dtype=torch.float64)
    size[-1] = math.sqrt(alpha / of_bias)
    target = nn.functional.one_hot(data["y"], 4).numpy()
    model = Ridge(alpha, fit_intercept=False).fit((data["H"] * size).numpy(), target)
    expected = torch.from_numpy(model.coef_) * size
    torch.testing.assert_close(got / got.norm(), expected / expected.norm())


def centred(scores: Tensor) -> Tensor:
    return scores - scores.mean(-1, keepdim=True)


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_the_ridge_head_gives_scores_as_large_as_the_clients_own(size: float) -> None:
    """An offset that all classes share is no part of the size."""
    data = of_classes()
    Z, prior = size * randn(300, 4, seed=3) + 50, randn(1, 4, 6)
    sums = replace(data["sums"], cross=(Z.T @ data["H"]).unsqueeze(0))
    bare = solved(Regression(0.01), BIASED, sums, prior, is_head=True)[0]
    squares = torch.stack([Z.square().sum(), centred(Z).square().sum()])
    told = replace(sums, by_class=replace(sums.by_class, squares=squares))
    got = solved(Regression(0.01), BIASED, told, prior, is_head=True)[0]
    torch.testing.assert_close(centred(data["H"] @ got.T).square().sum(), squares[1])
    # Without the squares, as with privacy, the head that is fitted to Z says how large they are.
    of_outputs = solved(Regression(0.01, "regression"), BIASED, sums, prior, is_head=True)[0]
    sizes = [centred(data["H"] @ W.T).square().sum() for W in (bare, of_outputs)]
    torch.testing.assert_close(*sizes)
    torch.testing.assert_close(got / got.norm(), bare / bare.norm())


def test_outputs_of_zero_do_not_silence_the_ridge_head() -> None:
    data = of_classes()
    nothing = torch.zeros(2, dtype=torch.float64)
    sums = replace(data["sums"], by_class=replace(data["sums"].by_class, squares=nothing))
    W = solved(Regression(0.01), BIASED, sums, torch.zeros(1, 4, 6).double(), is_head=True)[0]
    assert float(((data["H"] @ W.T).argmax(1) == data["y"]).double().mean()) > 0.8


@pytest.mark.parametrize("head", ["ridge", "lda"])
def test_clients_that_agree_are_fitted_to_their_outputs(head: Any) -> None:
    """From disagreement 0 to DISAGREEING a head goes straight from the clients' outputs to the labels."""
    data, prior = of_classes(), randn(1, 4, 6)
    sums = replace(data["sums"], cross=randn(1, 4, 6, seed=3) @ data["sums"].gram)

    def at(share: float, **options: Any) -> Tensor:
        given = replace(sums, disagreement=share * DISAGREEING)
        return solved(Regression(0.01, **options), BIASED, given, prior, is_head=True)

    none, half, whole, more = (at(share, head=head) for share in (0, 0.5, 1, 7))
    assert torch.equal(whole, more)
    torch.testing.assert_close(none, at(1, head="regression"))
    torch.testing.assert_close(half, (none + whole) / 2)
    assert not torch.allclose(none, whole, rtol=0.1)


def test_clients_that_agree_are_not_pulled() -> None:
    data, Z, prior = of_classes(), randn(300, 3, seed=1), randn(1, 3, 6, seed=2)
    Y = nn.functional.one_hot(data["y"], 4).double()
    sums = replace(totals(data["H"], Z), by_class=replace(data["sums"].by_class, outputs=Y.T @ Z))
    for share, pull in ((0.0, 0.0), (0.5, 0.3), (1.0, 0.6), (4.0, 0.6)):
        got = solved(Regression(0.01, pull=0.6), BIASED, replace(sums, disagreement=share * DISAGREEING), prior)
        torch.testing.assert_close(got, solved(Regression(0.01, pull=pull), BIASED, sums, prior))


def test_disagreement_is_what_the_average_does_not_explain() -> None:
    data = of_classes()
    average, by_class = randn(1, 4, 6), data["sums"].by_class

    def of(Z: Tensor) -> float:
        squares = torch.stack([Z.square().sum(), centred(Z).square().sum()])
        told = replace(totals(data["H"], Z), by_class=replace(by_class, squares=squares))
        return disagreement(BIASED, told, average)

    explained = data["H"] @ average[0].T
    Z = explained + randn(300, 4, seed=4)
    assert of(Z) == pytest.approx(float((Z - explained).square().sum() / Z.square().sum()))
    assert 0 <= of(explained) < 1e-12
    assert of(-explained) == 1
    assert of(0 * explained) == 0
    assert disagreement(BIASED, data["sums"], average) == 1  # nobody said
    assert disagreement(BIASED, replace(data["sums"], by_class=None), average) == 1


def test_lda_is_the_gaussian_posterior() -> None:
    """The scores are log π + log N(x; μ, Σ) with one Σ for all classes, up to a term that all classes share."""
    data = of_classes()
    x, y = data["x"], data["y"]
    W = solved(Regression(0, "lda"), BIASED, data["sums"], torch.zeros(1, 4, 6).double(), is_head=True)[0]
    means = torch.stack([x[y == k].mean(0) for k in range(4)])
    within = (x - means[y]).T @ (x - means[y]) / len(x)
    joint = torch.stack(
        [
            torch.distributions.MultivariateNormal(means[k], within).log_prob(x) + (y == k).double().mean().log()
            for k in range(4)
        ],
        1,
    )
    torch.testing.assert_close((data["H"] @ W.T).log_softmax(1), joint.log_softmax(1), rtol=1e-6, atol=1e-6)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy())
    assert np.array_equal((data["H"] @ W.T).argmax(1).numpy(), theirs.predict_proba(x.numpy()).argmax(1))


def test_lda_without_a_bias_is_the_nearest_linear_function() -> None:
    data = of_classes(bias=False)
    sums, x = data["sums"], data["x"]
    got = solved(Regression(0, "lda"), LINEAR, sums, torch.zeros(1, 4, 5).double(), is_head=True)[0]
    with_bias = solved(Regression(0, "lda"), BIASED, of_classes()["sums"], torch.zeros(1, 4, 6).double(), is_head=True)[
        0
    ]
    wanted = x @ with_bias[:, :-1].T + with_bias[:, -1]
    torch.testing.assert_close(got, torch.linalg.lstsq(x, wanted).solution.T)


@pytest.mark.parametrize("head", ["ridge", "lda"])
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_a_class_that_nobody_holds_is_never_chosen(head: Any, noise: float) -> None:
    """An absent class also counts as absent if its count is only the round-off that cancelled masks leave."""
    data = of_classes(held=(0, 2, 3))
    data["sums"].by_class.counts[1] += noise
    data["sums"].by_class.labels[1] += noise
    W = solved(Regression(1e-3, head), BIASED, data["sums"], torch.zeros(1, 4, 6).double(), is_head=True)[0]
    scores = data["H"] @ W.T
    assert W.isfinite().all()
    assert 1 not in scores.argmax(1)
    assert float((scores.argmax(1) == data["y"]).double().mean()) > 0.8


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e8])
@pytest.mark.parametrize("bias", [True, False])
def test_lda_of_poor_totals_is_finite(scale: float, bias: bool) -> None:
    d = 3 + bias
    gram = torch.zeros(d, d, dtype=torch.float64)
    gram[0, 0] = 4 * scale
    labels = torch.zeros(2, d, dtype=torch.float64)
    labels[0, 0] = 4 * scale**0.5
    if bias:
        gram[-1, -1], labels[0, -1] = 4, 4
    W = discriminant(gram, labels, torch.tensor([4.0, 0], dtype=torch.float64), torch.zeros(1, 1).double(), bias)
    assert W.isfinite().all()


def test_the_head_follows_the_labels_only_where_there_are_some() -> None:
    H, Z = randn(50, 6), randn(50, 3, seed=1)
    prior = randn(1, 3, 6, seed=2)
    one, *others = (
        solved(Regression(head=head), LINEAR, totals(H, Z), prior) for head in ("regression", "ridge", "lda")
    )
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("pull", [0.0, 0.3, 1.0])
def test_the_pull_moves_targets_to_the_mean_of_their_class(pull: float) -> None:
    data = of_classes()
    y, H, Z, prior = data["y"], data["H"], randn(300, 3, seed=1), randn(1, 3, 6, seed=2)
    Y = nn.functional.one_hot(y, 4).double()
    sums = replace(totals(H, Z), by_class=replace(data["sums"].by_class, outputs=Y.T @ Z))
    means = torch.stack([Z[y == k].mean(0) for k in range(4)])[y]
    wanted = solved(Regression(0.01, pull=0), BIASED, totals(H, (1 - pull) * Z + pull * means), prior)
    torch.testing.assert_close(solved(Regression(0.01, pull=pull), BIASED, sums, prior), wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_a_joined_batchnorm_holds_the_statistics_of_its_inputs(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=bias), nn.BatchNorm1d(3)).double()
    x = randn(40, 5) * 3 + 1
    (unit,) = plan(model, x).stages[0]
    H = torch.cat([x, torch.ones(40, 1)], 1)
    matrix = randn(1, 3, 6, seed=1)
    model.load_state_dict({**model.state_dict(), **write(unit, matrix, (H.T @ H)[None], model, model.state_dict())})
    torch.testing.assert_close(model.eval()(x), H @ matrix[0].T)
    inner = model[0](x)
    torch.testing.assert_close(model[1].running_mean, inner.mean(0))
    torch.testing.assert_close(model[1].running_var, inner.var(0, unbiased=False))


def test_a_batchnorm_by_itself_is_fitted_on_its_inputs() -> None:
    """Its scale and shift are fitted to the clients' outputs. Its running statistics are those of the merged inputs."""
    model = nn.BatchNorm1d(3).double()
    x, z = randn(40, 3) * 5 + 100, randn(40, 3, seed=1)
    h = torch.stack([x, torch.ones_like(x)], -1).transpose(0, 1)
    sums = UnitSums(h.mT @ h, z.T.unsqueeze(1) @ h)
    new = fitted(Regression(0), network(model)[""], sums, randn(3, 1, 2), model, 9)
    model.load_state_dict({**model.state_dict(), **new})
    torch.testing.assert_close(model.running_mean, x.mean(0))
    torch.testing.assert_close(model.running_var, x.var(0, unbiased=False))
    expected = torch.stack(
        [h[k] @ torch.linalg.lstsq(h[k], z[:, k : k + 1]).solution for k in range(3)],
    )[..., 0].T
    torch.testing.assert_close(model.eval()(x), expected, rtol=1e-6, atol=1e-6)


def test_a_batchnorm_by_itself_is_pulled_to_the_function_of_its_prior() -> None:
    """The prior is in coordinates of x, and the fit in those of the normalised inputs."""
    model = nn.BatchNorm1d(3).double()
    x, z, prior = randn(40, 3) * 5 + 100, randn(40, 3, seed=1), randn(3, 1, 2, seed=2)
    h = torch.stack([x, torch.ones_like(x)], -1).transpose(0, 1)
    sums = UnitSums(h.mT @ h, z.T.unsqueeze(1) @ h)
    new = fitted(Regression(1e9), network(model)[""], sums, prior, model, 2)
    model.load_state_dict({**model.state_dict(), **new})
    torch.testing.assert_close(model.eval()(x), (h @ prior.mT)[..., 0].T, rtol=1e-5, atol=1e-5)


def test_bad_options() -> None:
    with refused("ridge must be at least 0 and finite", "-1", error=ValueError):
        Regression(ridge=-1)
    with refused("pull must be in [0, 1]", "1.5", error=ValueError):
        Regression(pull=1.5)
    with refused("head must be one of regression, ridge, lda", "'svm'", error=ValueError):
        Regression(head="svm")  # type: ignore[arg-type]
