"""Losses of local training, against their formulas written out, and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from maecho.rounds.losses import (
    LOSSES,
    CrossEntropy,
    NotTrueDistillation,
    OwnClasses,
    RestrictedSoftmax,
    VacantDistillation,
)
from support.clients import rng

Z, TEACHER = (torch.randn(2, 3, 4, generator=rng(k), dtype=torch.float64) for k in (0, 1))
Y = torch.tensor([[0, 1, 0], [2, 2, 3]])
OWN = torch.tensor([[True, True, False, False], [False, False, True, True]])
PLAIN = functional.cross_entropy(Z.flatten(0, 1), Y.flatten(), reduction="none").view(2, 3)


def gradient(loss: object) -> Tensor:
    z = Z.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(z, Y, OWN, TEACHER).sum(), z)  # type: ignore[operator]
    assert found.isfinite().all()
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_for_every_example(name: str) -> None:
    found = LOSSES[name](Z, Y, OWN, TEACHER)
    assert found.shape == Y.shape
    assert bool((found >= 0).all())
    gradient(LOSSES[name])


def test_cross_entropy() -> None:
    torch.testing.assert_close(CrossEntropy()(Z, Y, OWN, None), PLAIN)


def test_own_classes_leave_the_others_alone() -> None:
    found = OwnClasses()(Z, Y, OWN, None)
    for c in range(2):
        for b in range(3):
            own = Z[c, b][OWN[c]]
            assert float(found[c, b]) == pytest.approx(float(own.logsumexp(0) - Z[c, b, Y[c, b]]))
    assert not gradient(OwnClasses())[~OWN.unsqueeze(1).expand_as(Z)].any()
    assert gradient(CrossEntropy())[~OWN.unsqueeze(1).expand_as(Z)].all()
    torch.testing.assert_close(OwnClasses()(Z, Y, torch.ones_like(OWN), None), PLAIN)
    single = torch.zeros_like(OWN)
    single[:, 2] = True
    assert not OwnClasses()(Z, torch.full_like(Y, 2), single, None).any(), "one class has nothing to learn"


def test_restricted_softmax_scales_the_scores_of_absent_classes() -> None:
    torch.testing.assert_close(RestrictedSoftmax(1.0)(Z, Y, OWN, None), PLAIN)
    scaled = Z[0, 0] * torch.tensor([1.0, 1.0, 0.3, 0.3])
    assert float(RestrictedSoftmax(0.3)(Z, Y, OWN, None)[0, 0]) == pytest.approx(
        float(scaled.logsumexp(0) - Z[0, 0, 0])
    )
    others = ~OWN.unsqueeze(1).expand_as(Z)
    assert gradient(RestrictedSoftmax(0.3))[others].abs().sum() < gradient(CrossEntropy())[others].abs().sum()


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> float:
    q, p = (teacher / temperature).softmax(0), (student / temperature).softmax(0)
    return float((q * (q / p).log()).sum())


def test_not_true_distillation() -> None:
    found = NotTrueDistillation(beta=0.7, temperature=2.0)(Z, Y, OWN, TEACHER)
    for c in range(2):
        for b in range(3):
            others = [k for k in range(4) if k != int(Y[c, b])]
            extra = 0.7 * 4 * divergence(TEACHER[c, b][others], Z[c, b][others], 2.0)
            assert float(found[c, b]) == pytest.approx(float(PLAIN[c, b]) + extra)
    torch.testing.assert_close(NotTrueDistillation()(Z, Y, OWN, Z), PLAIN)


def test_vacant_distillation() -> None:
    found = VacantDistillation(weight=0.5)(Z, Y, OWN, TEACHER)
    vacant = [2, 3]
    extra = 0.5 * divergence(TEACHER[0, 1][vacant], Z[0, 1][vacant])
    assert float(found[0, 1]) == pytest.approx(float(PLAIN[0, 1]) + extra)
    torch.testing.assert_close(VacantDistillation()(Z, Y, torch.ones_like(OWN), TEACHER), PLAIN)


def test_bad_settings() -> None:
    for make, part in (
        (lambda: RestrictedSoftmax(1.5), "scale must be from 0 to 1, got 1.5"),
        (lambda: NotTrueDistillation(beta=-1), "beta must be at least 0 and finite, got -1"),
        (lambda: NotTrueDistillation(temperature=0), "temperature must be positive and finite, got 0"),
        (lambda: VacantDistillation(math.inf), "weight must be at least 0 and finite, got inf"),
    ):
        with pytest.raises(ValueError, match=part):
            make()
