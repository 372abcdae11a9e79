"""An upload for some methods carries what these read, and nothing else."""

from __future__ import annotations

import pytest

import maecho
from maecho.aggregation import MAEcho, gathered_for
from maecho.privacy import Privacy
from maecho.statistics import NEEDED_BY, STATISTICS
from maecho.upload.client import make_upload
from support.clients import batches, network


def test_every_method_has_its_row() -> None:
    assert {
        name: (method.needs, gathered_for(method) - method.needs) for name, method in maecho.METHODS.items()
    } == NEEDED_BY


@pytest.mark.parametrize("method", ["fedavg", "ma-echo", "regmean", "echo-chain", "fisher"])
def test_it_carries_what_the_method_reads(method: str) -> None:
    upload = make_upload(network(), batches(), "a", for_methods=[method])
    expected = gathered_for(maecho.METHODS[method])
    assert set(upload.statistics) == expected
    assert upload.recipe["statistics"] == [name for name in STATISTICS if name in expected]


def test_methods_add_up_with_each_other_and_with_statistics() -> None:
    upload = make_upload(network(), batches(), "a", ["targets"], for_methods=["regmean", MAEcho(form="printed")])
    assert {"gram", "targets"} <= set(upload.statistics)
    assert "projector" not in upload.statistics


def test_with_privacy_only_what_can_have_noise_is_sent() -> None:
    upload = make_upload(network(), batches(), "a", for_methods=["echo-chain"], privacy=Privacy(1.0, 5.0))
    assert "moments" in upload.statistics
    with pytest.raises(ValueError, match="a: with privacy the statistics must be among"):
        make_upload(network(), batches(), "a", for_methods=["regmean"], privacy=Privacy(1.0, 5.0))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"a: for_methods must be among .*regmean.*, got 'regmeen'"):
        make_upload(network(), batches(), "a", for_methods=["regmeen"])
    with pytest.raises(ValueError, match=r"a: for_methods must be a list from .*, got the text 'regmean'"):
        make_upload(network(), batches(), "a", for_methods="regmean")
