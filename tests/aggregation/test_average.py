"""Averages by number of examples and uniform, and the class-aware head, on values computed by hand."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

import maecho
from maecho.aggregation import OT, FedAvg


def with_rows(value: float, labels: list[int], client: str) -> maecho.Upload:
    """One linear layer of three classes, all of whose weights are `value`."""
    model = nn.Linear(2, 3, bias=False)
    nn.init.constant_(model.weight, value)
    return maecho.make_upload(model, [(torch.ones(len(labels), 2), torch.tensor(labels))], client, ["classes"])


UPLOADS = [
    (1.0, [0, 0, 1, 1, 1, 1, 1, 1]),  # 8 examples: 2 of class 0, 6 of class 1
    (5.0, [0, 0, 0, 0, 0, 0, 1, 1, 2]),  # 9 examples: 6 of class 0, 2 of class 1, a single one of class 2
    (9.0, [0]),  # 1 example: no class counts as held
]
BY_HAND: dict[tuple[str, str], list[float]] = {
    ("examples", "average"): [(8 * 1 + 9 * 5 + 1 * 9) / 18] * 3,
    ("uniform", "average"): [5.0] * 3,
    ("examples", "class-aware"): [(2 * 1 + 6 * 5) / 8, (6 * 1 + 2 * 5) / 8, (8 * 1 + 9 * 5 + 1 * 9) / 18],
    ("uniform", "class-aware"): [3.0, 3.0, 5.0],
}


@pytest.mark.parametrize("method", [FedAvg, OT])
@pytest.mark.parametrize(("weighting", "head"), BY_HAND)
def test_every_average_by_hand(weighting: Literal["examples", "uniform"], head: Any, method: type[FedAvg | OT]) -> None:
    """These networks have no neurons that could be matched, so that `ot` is the average alone."""
    uploads = [with_rows(value, labels, f"client-{i}") for i, (value, labels) in enumerate(UPLOADS)]
    expected = torch.tensor(BY_HAND[weighting, head])[:, None].expand(3, 2)
    torch.testing.assert_close(maecho.aggregate(uploads, method(weighting=weighting, head=head))["weight"], expected)
