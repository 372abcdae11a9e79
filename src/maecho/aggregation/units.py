"""The unit of the constant input of every layer with a bias, common to all uploads; see linalg/units.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from maecho.linalg.grams import CommonUnit
from maecho.upload.upload import Upload


def common_units(
    uploads: Iterable[Upload], weighting: Literal["examples", "uniform"] = "examples"
) -> dict[str, Tensor | None]:
    """Name of a layer -> the root mean square of the clients' inputs of it; None if it has no bias.

    This reads every upload once. Files are read again when they are merged.
    """
    found: dict[str, CommonUnit] = {}
    for upload in uploads:
        for name, G in upload.statistics["gram"].items():
            found.setdefault(name, CommonUnit(weighting)).add(G)
    return {name: common.unit for name, common in found.items()}
