"""A size for the whole upload: what one statistic does not need the others get, whichever comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maecho import make_upload
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
