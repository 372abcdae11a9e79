"""Where labels or the last layer are not the same for every batch, nothing is said by class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import make_upload
from maecho.linalg.gaussians import Gaussians
from support.clients import Net, batches, network
from support.tiny import refused

NO_LABELS = "the batches carry no whole-number label for every example"


@pytest.mark.parametrize("bare", [0, 3])
def test_one_batch_without_labels_leaves_no_counts(bare: int) -> None:
    data: list[Any] = list(batches())
    data[bare] = data[bare][0]
    with pytest.warns(UserWarning, match="^ann: ") as said:
        upload = make_upload(network(), data, "ann", ["classes", "targets", "gram"])
    assert "since 16 of 64 examples carry none" in str(said[0].message)
    assert f"ann: not sent: classes, targets, since {NO_LABELS}" in str(said[1].message)
    assert upload.has == {"gram"}
    assert upload.examples == 64
    assert upload.recipe["not_sent"] == {"classes": NO_LABELS, "targets": NO_LABELS}


@pytest.mark.filterwarnings("ignore:.*nothing of")
def test_a_last_layer_that_changes_has_no_targets() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.one(x)
        return h if float(x[0, 0]) > 0 else net.two(h.relu())

    model = Net(forward, one=nn.Linear(5, 5), two=nn.Linear(5, 5))
    x, y = torch.ones(8, 5), torch.arange(8) % 5
    for sign in (1, -1):
        assert make_upload(model, [(sign * x, y)] * 2, "ann", ["targets"]).has == {"targets"}
    with pytest.warns(
        UserWarning, match="ann: not sent: targets, since the last layer is not the same for every batch"
    ):
        upload = make_upload(model, [(x, y), (-x, y)], "ann", ["targets"])
    assert upload.has == set()
    assert upload.recipe["not_sent"]["targets"] == "the last layer is not the same for every batch"


@pytest.mark.filterwarnings("ignore:.*not sent")
def test_a_last_layer_of_other_rows_than_classes_is_no_head() -> None:
    model = Net(lambda net, x: net.last(x).unflatten(1, (4, 2)).amax(2), last=nn.Linear(12, 8))
    data = [(x, y % 4) for x, y in batches()]
    upload = make_upload(model, data, "ann", ["classes", "targets", "gram"])
    assert upload.head is None
    assert upload.has == {"classes", "gram"}
    assert len(upload.statistics["classes"]) == 4
    assert upload.recipe["not_sent"]["targets"] == "the model has no last layer with one row for each class"


def test_features_are_of_the_classes_that_the_moments_have() -> None:
    upload = make_upload(network(), batches(), "ann", ["moments", "features"], rank=None)
    (layer,) = upload.statistics["features"]
    found = upload.statistics["features"][layer]
    assert isinstance(found, Gaussians)
    other = replace(found, classes=found.classes.clone().index_fill_(0, torch.tensor([4]), 7))
    with refused(f"ann: features of '{layer}' must be one Gaussian for each class", "got classes [0, 1, 2, 3, 7]"):
        replace(upload, statistics={**upload.statistics, "features": {layer: other}})
