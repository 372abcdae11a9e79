"""A size for the whole upload: what one statistic does not need the others get, whichever comes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from maecho import InputError, make_upload
from maecho.statistics import STATISTICS
from maecho.upload import size
from support.clients import batches, network


@pytest.mark.parametrize("small", ["gram", "projector"])
def test_what_one_statistic_does_not_need_goes_to_the_other(small: str) -> None:
    whole = make_upload(network(), batches(count=8), "ann", ["gram", "projector"], rank=None)
    thin = STATISTICS[small].cut(whole.statistics[small], lambda spectrum: 1)
    upload = replace(whole, statistics={**whole.statistics, small: thin})
    (large,) = {"gram", "projector"} - {small}
    room = upload.bytes([small]) + 0.8 * upload.bytes([large]) - 0.8 * upload.bytes([])
    cut = size.cut(upload, size.Size(room, times=False))
    assert cut.bytes() <= room
    assert cut.bytes([small]) == upload.bytes([small])
    # Of a layer's spectrum whole directions are kept, so a little room stays.
    assert cut.bytes() > 0.9 * room


def test_a_rank_for_each_layer() -> None:
    """What is named is cut to its rank, what is not named stays whole, and inputs' moments are of no layer."""
    statistics = ["gram", "projector", "moments"]
    whole = make_upload(network(), batches(count=8), "ann", statistics, rank=None)
    first, *others = whole.statistics["gram"]
    upload = make_upload(network(), batches(count=8), "ann", statistics, rank={first: 2})
    for name in ("gram", "projector"):
        assert upload.statistics[name][first].rank == 2
        for layer in others:
            assert upload.statistics[name][layer].rank == whole.statistics[name][layer].rank
    assert upload.bytes(["moments"]) == whole.bytes(["moments"])
    assert upload.recipe["rank"] == {first: 2}


def test_a_rank_for_each_layer_names_layers() -> None:
    """Before the data are read."""

    def data() -> Iterator[None]:
        raise AssertionError("read the data")
        yield

    with pytest.raises(InputError, match=r"rank must name layers of the network \(.*\), got 'fc9'"):
        make_upload(network(), data(), "ann", rank={"fc9": 2})
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(InputError, match=r"rank of 'fc1' must be a whole number, at least 0, got"):
            size.parse({"fc1": wrong})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"rank must be a whole number, one for each layer, .* got \{\}"):
        size.parse({})
