"""Accuracy, calibration, and the three ensembles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import maecho
from support.clients import batches, network


class Fixed(nn.Module):
    """A model that gives the same logits for every example."""

    def __init__(self, *logits: float):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def test_accuracy_overall_and_per_class() -> None:
    data = [(torch.zeros(3, 1), torch.tensor([0, 1, 1])), (torch.zeros(2, 1), torch.tensor([1, 0]))]
    found = maecho.evaluate(Fixed(0.0, 1.0, 0.0), data)
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.per_class[:2] == (0.0, 1.0)
    assert math.isnan(found.per_class[2])
    assert found.examples == (2, 3, 0)


class Given(nn.Module):
    """A model whose inputs are its logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_calibration_error_bin_by_bin() -> None:
    """Confidences 0.61 and 0.62 (right) and 0.65 (wrong) share the bin (9/15, 10/15]. 0.9 and 0.95 have their own."""
    shares = torch.tensor([0.61, 0.65, 0.62, 0.9, 0.95], dtype=torch.float64)
    logits = torch.stack([shares, 1 - shares], 1).log()
    labels = torch.tensor([0, 1, 0, 0, 1])
    expected = (abs(2 - 0.61 - 0.65 - 0.62) + abs(1 - 0.9) + abs(0 - 0.95)) / 5
    for sizes in ([5], [2, 3], [1, 1, 1, 2]):
        found = maecho.evaluate(Given(), list(zip(logits.split(sizes), labels.split(sizes), strict=True)))
        assert found.calibration_error == pytest.approx(expected)


def test_a_sure_and_right_model_has_no_calibration_error() -> None:
    found = maecho.evaluate(Fixed(100.0, 0.0), [(torch.zeros(3, 1), torch.tensor([0, 0, 0]))])
    assert found.calibration_error == 0
    found = maecho.evaluate(Fixed(100.0, 0.0), [(torch.zeros(4, 1), torch.tensor([0, 1, 1, 1]))])
    assert found.calibration_error == pytest.approx(0.75)


def test_confidence_one_fifteenth_is_in_the_first_bin() -> None:
    """Of 15 classes with equal outputs the confidence is 1/15, the smallest there is."""
    found = maecho.evaluate(Fixed(*[0.0] * 15), [(torch.zeros(15, 1), torch.arange(15))])
    assert found.calibration_error == pytest.approx(0, abs=1e-7)


def test_an_ensemble_by_probabilities_is_not_squashed_twice() -> None:
    models = [Fixed(2.0, 0.0), Fixed(4.0, 0.0)]
    data = [(torch.zeros(2, 1), torch.tensor([0, 0]))]
    mean = float(torch.stack([m.logits for m in models]).detach().softmax(1).mean(0)[0])
    assert maecho.evaluate(maecho.Ensemble(models), data).calibration_error == pytest.approx(1 - mean)
    by_logits = float(torch.tensor([3.0, 0.0]).softmax(0)[0])
    assert maecho.evaluate(maecho.Ensemble(models, "logits"), data).calibration_error == pytest.approx(1 - by_logits)


def test_per_client() -> None:
    clients = {"a": [(torch.zeros(1, 1), torch.tensor([1]))], "b": [(torch.zeros(1, 1), torch.tensor([0]))]}
    found = {name: maecho.evaluate(Fixed(0.0, 1.0), data) for name, data in clients.items()}
    assert {name: one.accuracy for name, one in found.items()} == {"a": 1.0, "b": 0.0}


def test_the_model_keeps_its_mode() -> None:
    model = network().train()
    maecho.evaluate(model, batches())
    assert model.training


def test_three_ensembles_differ_as_they_should() -> None:
    models = [Fixed(9.0, 0.0, 1.0), Fixed(0.0, 2.0, 1.0), Fixed(0.0, 2.0, 1.0)]
    x = torch.zeros(1, 1)
    torch.testing.assert_close(maecho.Ensemble(models, "logits")(x), torch.tensor([[3.0, 4 / 3, 1.0]]))
    probabilities = torch.stack([m.logits for m in models]).softmax(1).mean(0)
    torch.testing.assert_close(maecho.Ensemble(models, "probabilities")(x)[0], probabilities)
    counts = [torch.tensor([1, 5, 0]), torch.tensor([0, 2, 0]), torch.tensor([7, 0, 0])]
    aware = maecho.Ensemble(models, "class-aware", counts)(x)
    # Class 0: the third model alone (one example is not enough for the first); class 1: the first two; class 2: nobody.
    torch.testing.assert_close(aware, torch.tensor([[0.0, 1.0, 0.0]]))


def test_an_ensemble_of_one_is_that_model() -> None:
    model = network()
    assert maecho.evaluate(maecho.Ensemble([model]), batches()) == maecho.evaluate(model, batches())
