"""A data set and a network whose accuracies are known beforehand, so that a wrong reading gives another number.

An input of class c is the c-th unit vector. Training labels are right. Of the test labels of class c the first
`WRONG[c]` of 20 are those of the next class, so a perfect model is right on 100 % in training and on 75 % in the test.

`fit` stands in for training. It writes down weights by a rule: a client scores each class that it holds by its own
scale, and every class that it does not hold below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maecho.lab import data, networks
from maecho.lab.data import Dataset
from maecho.lab.experiment import Experiment
from maecho.lab.training import LocalTraining

CLASSES = 4
EACH = 20
WRONG = (8, 4, 5, 3)
PERFECT = 75.0
SCALES = (1.0, 4.0, 0.5, 9.0)
"""Client i scores with the i-th; chosen so that means of logits and of probabilities decide differently."""


def dataset(pixel: float = 0.0) -> Dataset:
    """The data set. `pixel` is added to one number of one training image."""
    y = torch.arange(CLASSES).repeat_interleave(EACH)
    x = torch.eye(CLASSES)[y].reshape(-1, 1, 2, 2)
    x_train = x.clone()
    x_train[0, 0, 0, 0] += pixel
    labels = y.clone()
    for c, wrong in enumerate(WRONG):
        labels[c * EACH : c * EACH + wrong] = (c + 1) % CLASSES
    return Dataset("known", x_train, y, x, labels, CLASSES)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(CLASSES, CLASSES, bias=False))


def weights(held: Sequence[int], scale: float) -> np.ndarray:
    """What `fit` leaves: the score of a held class is the scale on its own input, of the others always below zero."""
    W = np.full((CLASSES, CLASSES), -1.0)
    for c in held:
        W[c] = 0
        W[c, c] = scale
    return W


def accuracy(scores: np.ndarray) -> float:
    """Of a model whose score for input j is column j: the share of right test answers in per cent, by counting."""
    right = 0
    for j in range(CLASSES):
        answer = int(scores[:, j].argmax())
        right += (EACH - WRONG[j]) * (answer == j) + WRONG[j] * (answer == (j + 1) % CLASSES)
    return 100 * right / (CLASSES * EACH)


class Training:
    """Counts and records what is trained, in place of training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.starts: list[torch.Tensor] = []
        self.seeds: list[int] = []
        self.data = dataset()
        monkeypatch.setitem(data.DATASETS, "known", lambda: self.data)
        monkeypatch.setitem(networks.NETWORKS, "known", network)
        monkeypatch.setattr(LocalTraining, "__call__", self._fit_in_place_of(self))

    @staticmethod
    def _fit_in_place_of(training: Training) -> Any:
        def fit(self: LocalTraining, model: nn.Module, x: torch.Tensor, y: torch.Tensor, rng: torch.Generator) -> None:
            layer = model[1]  # type: ignore[index]
            training.starts.append(layer.weight.detach().clone())
            training.seeds.append(rng.initial_seed())
            scale = SCALES[(len(training.seeds) - 1) % len(SCALES)]
            held = sorted(set(y.tolist()))
            layer.weight.data = torch.from_numpy(weights(held, scale)).float()
            model.eval()

        return fit

    @property
    def count(self) -> int:
        return len(self.seeds)


def experiment(methods: dict[str, dict[str, Any]], **changes: Any) -> Experiment:
    """Three clients with the known data."""
    told: dict[str, Any] = {
        "name": "known", "title": "Known answers", "data": "known", "network": "known", "seeds": (0,),
        "cells": ({"clients": 3, "beta": 0.1, "init": "same"},), "methods": methods,
    }  # fmt: skip
    return Experiment(**{**told, **changes})
