"""What makes an upload sound. A failed check is one sentence: the client, what was expected, what came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from maecho.errors import InputError, UploadError
from maecho.network.spaces import Spaces
from maecho.network.spaces import check as fit
from maecho.statistics import STATISTICS, Statistic

if TYPE_CHECKING:
    from maecho.upload.upload import Upload


def weights(upload: Upload) -> None:
    """Name, number of examples, weights, and the layers that are read from them."""
    client = upload.client
    if not isinstance(client, str) or not client.strip():
        raise UploadError(f"a client must have a name, got {client!r}")
    if isinstance(upload.examples, bool) or not isinstance(upload.examples, int) or upload.examples < 1:
        raise UploadError(f"{client}: the number of examples must be at least 1, got {upload.examples!r}")
    if not upload.weights:
        raise UploadError(f"{client}: an upload must carry weights, got none")
    for name, tensor in upload.weights.items():
        if not isinstance(tensor, Tensor):
            raise UploadError(f"{client}: weight {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UploadError(f"{client}: weight {name!r} must be finite, got NaN or infinity")
    for alias, kept in upload.aliases.items():
        if kept not in upload.weights:
            raise UploadError(f"{client}: {alias!r} must be tied to a weight, got {kept!r}, which is not there")
    for layer in upload.layers:
        wrong = layer.complaint({name: tensor.shape for name, tensor in upload.weights.items()})
        if wrong:
            raise UploadError(f"{client}: {wrong}")
    if upload.head is not None and upload.head not in {layer.name for layer in upload.layers}:
        raise UploadError(f"{client}: the head must be one of its layers, got {upload.head!r}")


def known(client: str, name: str) -> Statistic:
    """The row of STATISTICS of this name."""
    if name not in STATISTICS:
        raise UploadError(f"{client}: statistics must be among {', '.join(STATISTICS)}, got {name!r}")
    return STATISTICS[name]


def spaces(upload: Upload, found: Spaces) -> None:
    try:
        fit(found, upload.weights)
    except InputError as error:
        raise UploadError(f"{upload.client}: {error}") from error
