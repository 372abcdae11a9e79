"""Fisher merging against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import maecho
from maecho.upload.client import make_upload
from support.clients import batches, clients
from support.tiny import refused, with_statistics


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_merge_is_the_weighted_average(ridge: float, weighting: Any) -> None:
    given = clients(3, torch.float64, rank=None)
    merged = maecho.aggregate(given, "fisher", ridge=ridge, weighting=weighting)
    average = maecho.aggregate(given, "fedavg", weighting=weighting)
    for name in merged:
        F = [u.statistics["fisher"][name] / (1 if weighting == "examples" else u.examples) for u in given]
        total = sum(F)
        pull = ridge * total.mean()  # type: ignore[union-attr]
        top = sum(f * u.weights[name] for f, u in zip(F, given, strict=True)) + pull * average[name]
        bottom = total + pull
        expected = torch.where(bottom > 0, top / bottom.where(bottom > 0, torch.ones(()).double()), average[name])
        torch.testing.assert_close(merged[name], expected)


def test_where_nobody_has_information_the_average_stands() -> None:
    given = clients(2, torch.float64)
    silent = [
        with_statistics(u, fisher={n: F * (n != "2.weight") for n, F in u.statistics["fisher"].items()}) for u in given
    ]
    for ridge in (0.0, 1e-3):
        merged, average = maecho.aggregate(silent, "fisher", ridge=ridge), maecho.aggregate(given, "fedavg")
        torch.testing.assert_close(merged["2.weight"], average["2.weight"])
        assert merged.averaged == ("2.weight",)


def test_a_client_that_alone_has_information_is_followed() -> None:
    one, two = clients(2, torch.float64)
    deaf = with_statistics(two, fisher={name: torch.zeros_like(F) for name, F in two.statistics["fisher"].items()})
    merged = maecho.aggregate([one, deaf], "fisher", ridge=0.0)
    for name, F in one.statistics["fisher"].items():
        torch.testing.assert_close(merged[name][F > 0], one.weights[name][F > 0])


def test_normalisation_is_merged_and_buffers_are_averaged() -> None:
    made_of = []
    for i in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
            model(batches(i)[0][0])
            nn.init.normal_(model[1].weight)
        made_of.append(make_upload(model, batches(i), f"{i}", ["fisher"]))
    merged = maecho.aggregate(made_of, "fisher")
    average = maecho.aggregate(made_of, "fedavg")
    assert set(merged.averaged) == {f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    torch.testing.assert_close(merged["1.running_mean"], average["1.running_mean"])
    assert not torch.allclose(merged["1.weight"], average["1.weight"])


def test_clients_speak_of_the_same_parameters() -> None:
    model = nn.Sequential(nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    ann, bob = (make_upload(model, batches(), client, ["fisher"]) for client in ("ann", "bob"))
    less = with_statistics(bob, fisher={name: F for name, F in bob.statistics["fisher"].items() if name != "1.weight"})
    with refused("bob", "fisher of '1.weight'", "as in ann", "got none"):
        maecho.aggregate([ann, less], "fisher")
    with refused("ann", "fisher of '1.weight'", "as in bob", "got one"):
        maecho.aggregate([less, ann], "fisher")
