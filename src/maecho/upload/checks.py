"""Checks that an upload is sound. A failed check raises one sentence: the client, what was expected, what came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from maecho.errors import UploadError
from maecho.linalg.finite import is_finite
from maecho.statistics import STATISTICS
from maecho.upload import header

if TYPE_CHECKING:
    from maecho.upload.upload import Upload


def not_finite(name: str) -> str:
    """What is wrong with a weight that holds NaN."""
    return f"weight {name!r} must be finite, got NaN or infinity"


def weights(upload: Upload) -> None:
    """Check the client's name, the number of examples, the recipe, the weights and the layers."""
    header.check_client(upload.client, upload.examples)
    header.check_recipe(upload.client, upload.recipe)
    for name, tensor in upload.weights.items():
        if not isinstance(tensor, Tensor):
            raise UploadError(f"{upload.client}: weight {name!r} must be a tensor, got {type(tensor).__name__}")
    header.check_architecture(upload.client, upload.weights, upload.layers, upload.head, upload.aliases, upload.stored)
    for name, tensor in upload.weights.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise UploadError(f"{upload.client}: {not_finite(name)}")


def statistics(upload: Upload) -> dict[str, Any]:
    """Check all statistics of an upload, in the order of STATISTICS. Some checks read statistics of earlier rows."""
    for name in upload.statistics:
        if name not in STATISTICS:
            raise UploadError(f"{upload.client}: statistics must be among {', '.join(STATISTICS)}, got {name!r}")
    return {
        name: statistic.check(upload.statistics[name], upload)
        for name, statistic in STATISTICS.items()
        if name in upload.statistics
    }
