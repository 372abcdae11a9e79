"""Losses of local training, against their formulas written out, and their limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from maecho.rounds.training.losses import (
    LOSSES,
    CrossEntropy,
    Loss,
    NotTrueDistillation,
    OwnClasses,
    RestrictedSoftmax,
    SquaredError,
    Step,
    VacantDistillation,
    shares,
)
from support.clients import rng

Z, TEACHER = (torch.randn(2, 3, 4, generator=rng(k), dtype=torch.float64) for k in (0, 1))
Y = torch.tensor([[0, 1, 0], [2, 2, 3]])
SHARES = torch.tensor([[0.25, 0.75, 0, 0], [0, 0, 0.6, 0.4]], dtype=torch.float64)
OWN = SHARES > 0
EQUAL = torch.full_like(SHARES, 0.25)
STEP = Step(Z, Y, SHARES, teacher=TEACHER)
PLAIN = functional.cross_entropy(Z.flatten(0, 1), Y.flatten(), reduction="none").view(2, 3)


def gradient(loss: Loss) -> Tensor:
    z = Z.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(replace(STEP, logits=z)).sum(), z)
    assert found.isfinite().all()
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_for_every_example(name: str) -> None:
    found = LOSSES[name](STEP)
    assert found.shape == Y.shape
    gradient(LOSSES[name])


def test_cross_entropy() -> None:
    torch.testing.assert_close(CrossEntropy()(STEP), PLAIN)


def test_own_classes_leave_the_others_alone() -> None:
    found = OwnClasses()(STEP)
    for c in range(2):
        for b in range(3):
            own = Z[c, b][OWN[c]]
            assert float(found[c, b]) == pytest.approx(float(own.logsumexp(0) - Z[c, b, Y[c, b]]))
    assert not gradient(OwnClasses())[~OWN.unsqueeze(1).expand_as(Z)].any()
    assert gradient(CrossEntropy())[~OWN.unsqueeze(1).expand_as(Z)].all()
    torch.testing.assert_close(OwnClasses()(replace(STEP, shares=EQUAL)), PLAIN)
    single = torch.zeros_like(SHARES)
    single[:, 2] = 1
    assert not OwnClasses()(Step(Z, torch.full_like(Y, 2), single)).any(), "one class has nothing to learn"


def test_restricted_softmax_scales_the_scores_of_absent_classes() -> None:
    torch.testing.assert_close(RestrictedSoftmax(1.0)(STEP), PLAIN)
    scaled = Z[0, 0] * torch.tensor([1.0, 1.0, 0.3, 0.3])
    assert float(RestrictedSoftmax(0.3)(STEP)[0, 0]) == pytest.approx(float(scaled.logsumexp(0) - Z[0, 0, 0]))
    others = ~OWN.unsqueeze(1).expand_as(Z)
    assert gradient(RestrictedSoftmax(0.3))[others].abs().sum() < gradient(CrossEntropy())[others].abs().sum()


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> float:
    q, p = (teacher / temperature).softmax(0), (student / temperature).softmax(0)
    return float((q * (q / p).log()).sum())


def test_not_true_distillation() -> None:
    found = NotTrueDistillation(beta=0.7, temperature=2.0)(STEP)
    for c in range(2):
        for b in range(3):
            others = [k for k in range(4) if k != int(Y[c, b])]
            extra = 0.7 * 4 * divergence(TEACHER[c, b][others], Z[c, b][others], 2.0)
            assert float(found[c, b]) == pytest.approx(float(PLAIN[c, b]) + extra)
    torch.testing.assert_close(NotTrueDistillation()(replace(STEP, teacher=Z)), PLAIN)


def test_vacant_distillation() -> None:
    """Both parts, written out; and the plain loss of a client that has all classes equally often."""
    found = VacantDistillation(distillation=0.5, suppression=0.3)(STEP)
    for c in range(2):
        prior = (SHARES[c] + 1e-9).log()
        held = 0.0
        for k in (int(k) for k in OWN[c].nonzero()):
            terms = [
                1.0 if Y[c, b] == k else math.exp(float(Z[c, b, k] - SHARES[c, k].log()) - math.log(4))
                for b in range(3)
            ]
            held += float(SHARES[c, k]) * math.log(sum(terms) / 3)
        vacant = (~OWN[c]).nonzero().flatten().tolist()
        for b in range(3):
            adjusted = Z[c, b] + prior
            plain = float(adjusted.logsumexp(0) - adjusted[Y[c, b]])
            apart = divergence(TEACHER[c, b][vacant], Z[c, b][vacant])
            assert float(found[c, b]) == pytest.approx(plain + 0.5 * apart + 0.3 * held, rel=1e-7)
    equal = VacantDistillation(suppression=0)(replace(STEP, shares=EQUAL))
    torch.testing.assert_close(equal, PLAIN, rtol=1e-7, atol=1e-7)


def test_suppression_holds_down_the_scores_of_other_classes() -> None:
    step = replace(STEP, shares=EQUAL)
    z = Z.clone().requires_grad_()
    with_it, without = (VacantDistillation(0.0, s)(replace(step, logits=z)).mean() for s in (1.0, 0.0))
    (slope,) = torch.autograd.grad(with_it - without, z)
    label = functional.one_hot(Y, 4) == 1
    assert bool((slope[~label] > 0).all())
    assert not slope[label].any()


def test_what_stands_behind_the_examples_is_not_read() -> None:
    """A client with fewer examples in a step than the others: the losses of its examples are those without padding."""
    counted = torch.tensor([[True, True, False], [True, True, True]])
    for name, loss in LOSSES.items():
        odd = Z.clone()
        odd[0, 2] = 1e6
        whole = loss(replace(STEP, logits=odd, counted=counted))
        short = loss(Step(Z[:1, :2], Y[:1, :2], SHARES[:1], None, TEACHER[:1, :2]))
        torch.testing.assert_close(whole[0, :2], short[0], msg=name)


def test_squared_error() -> None:
    wanted = torch.eye(4, dtype=torch.float64)[Y]
    torch.testing.assert_close(SquaredError()(STEP), (Z - wanted).pow(2).sum(-1))


def test_shares() -> None:
    found = shares(torch.tensor([0, 2, 2, 2]), 4, Z)
    assert found.tolist() == [0.25, 0, 0.75, 0]
    assert found.dtype == Z.dtype


def test_bad_settings() -> None:
    for make, part in (
        (lambda: RestrictedSoftmax(1.5), "scale must be from 0 to 1, got 1.5"),
        (lambda: NotTrueDistillation(beta=-1), "beta must be at least 0 and finite, got -1"),
        (lambda: NotTrueDistillation(temperature=0), "temperature must be positive and finite, got 0"),
        (lambda: VacantDistillation(math.inf), "distillation must be at least 0 and finite, got inf"),
    ):
        with pytest.raises(ValueError, match=part):
            make()
