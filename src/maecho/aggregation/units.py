"""The unit of the constant input of every layer with a bias, common to all uploads; see linalg/units.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from maecho.aggregation.method import parts_of
from maecho.linalg.grams import CommonUnit
from maecho.upload.upload import Upload


def common_units(
    uploads: Sequence[Upload], weighting: Literal["examples", "uniform"] = "examples"
) -> dict[str, Tensor | None]:
    """Name of a layer -> the root mean square of the clients' inputs of it; None if it has no bias.

    This reads the Grams of layers with a bias once, one after another, and nothing else. They are read again when they
    are merged.
    """
    given = parts_of(uploads)
    found: dict[str, CommonUnit] = {layer.name: CommonUnit(weighting) for layer in given[0].layers}
    for layer in given[0].layers:
        for upload in given if layer.bias is not None else ():
            found[layer.name].add(upload.statistics["gram"][layer.name])
    return {name: common.unit for name, common in found.items()}
