"""Options of `make_upload` reach the statistics that they are for, and their recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maecho import InputError, Upload, make_upload
from maecho.linalg.gaussians import Gaussians
from maecho.statistics import Options
from support.clients import batches, network, rng
from support.values import close


def made(name: str, **options: Any) -> Upload:
    return make_upload(network(), batches(), "ann", [name], rank=None, **options)


def test_gaussians_and_covariance_are_those_of_the_moments() -> None:
    upload = made("moments", gaussians=3, covariance="shared")
    found = upload.statistics["moments"]
    assert isinstance(found, Gaussians)
    assert max(found.classes.bincount().tolist()) == 3
    assert len(found.covariances) == 1
    assert upload.recipe["moments"].endswith("Gaussians a class: 3, covariance: shared")


@pytest.mark.parametrize(("covariance", "count"), [("class", 5), ("shared", 1)])
def test_covariance_is_that_of_the_features_too(covariance: Any, count: int) -> None:
    """They have one Gaussian a class, whatever the moments have."""
    (found,) = made("features", gaussians=3, covariance=covariance).statistics["features"].values()
    assert isinstance(found, Gaussians)
    assert found.classes.tolist() == [0, 1, 2, 3, 4]
    assert len(found.covariances) == count


@pytest.mark.parametrize("name", ["fisher", "gradients"])
def test_labels_are_those_of_the_backward_passes(name: str) -> None:
    by = {
        "expected": made(name),
        "observed": made(name, labels="observed"),
        "sampled": made(name, labels="sampled", generator=rng(1)),
    }
    assert not any(close(by[one].statistics[name], by["expected"].statistics[name]) for one in ("observed", "sampled"))
    assert all(upload.recipe[name].endswith(f"labels {labels}") for labels, upload in by.items())
    again = made(name, labels="sampled", generator=rng(1))
    assert close(again.statistics[name], by["sampled"].statistics[name], 0, 0), "the generator decides"
    other = made(name, labels="sampled", generator=rng(2))
    assert not close(other.statistics[name], by["sampled"].statistics[name])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "none"}, "labels must be one of expected, sampled, observed, got 'none'"),
        ({"labels": "sampled"}, "labels='sampled' must come with a generator, got none"),
        ({"gaussians": 0}, "gaussians must be a whole number, at least 1, got 0"),
        ({"gaussians": True}, "gaussians must be a whole number, at least 1, got True"),
        ({"covariance": "both"}, "covariance must be one of class, shared, got 'both'"),
    ],
)
def test_options_that_are_none(options: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        Options(**options)
    assert str(caught.value) == words
    assert Options(labels="sampled", generator=torch.Generator()).gaussians == 1
