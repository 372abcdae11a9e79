"""What cannot be evaluated ends in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from maecho import Ensemble, InputError, evaluate
from support.tiny import (
    batches,
    cases,
    fill_with_nan,
    network,
    refused,
    with_last_entry,
)

x, y = (torch.cat(part) for part in zip(*batches(), strict=True))


EVALUATE: dict[str, tuple[nn.Module, list[Any], tuple[str, ...]]] = {
    "no labels": (network(), [x], ("label",)),
    "labels that are no classes": (network(), [(x, y + 0.5)], ("label", "not whole numbers")),
    "too few labels": (network(), [(x, y[:7])], ("label",)),
    "one output for all": (nn.Sequential(network(), nn.Flatten(0)), [(x, y)], ("one output for each class",)),
    "no batches": (network(), [], ("at least one example", "got none")),
    "empty batches": (network(), [(x[:0], y[:0])], ("at least one example", "got none")),
    "label too large": (network(), [(x, y + 1)], ("0 … 2", "3 outputs", "3")),
    "negative label": (network(), [(x, y - 1)], ("0 … 2", "3 outputs", "-1")),
    "NaN in the inputs": (network(), [(with_last_entry(x), y)], ("finite", "NaN")),
    "NaN in the model": (network().apply(fill_with_nan), [(x, y)], ("finite", "NaN")),
}


@pytest.mark.parametrize(("model", "data", "parts"), **cases(EVALUATE))
def test_evaluate_refuses(model: nn.Module, data: list[Any], parts: tuple[str, ...]) -> None:
    model.train()
    with refused("evaluation", *parts, error=InputError):
        evaluate(model, data)
    assert model.training


@pytest.mark.parametrize(
    ("count", "by", "counts", "parts"),
    [
        (0, "probabilities", None, ("at least one model", "got none")),
        (2, "class-aware", None, ("class counts", "2 models", "got none")),
        (2, "class-aware", [torch.ones(3)], ("class counts", "2 models", "those of 1")),
        (2, "class-aware", [torch.ones(3), torch.ones(2)], ("class counts",)),
        (2, "class-aware", [torch.ones(3), None], ("class counts",)),
        (1, "vote", None, ("logits, probabilities or class-aware", "'vote'")),
    ],
)
def test_an_ensemble_refuses(count: int, by: Any, counts: Any, parts: tuple[str, ...]) -> None:
    with refused(*parts, error=ValueError):
        Ensemble([network()] * count, by, counts)
