"""Describes an upload for people, so that they can decide whether to send it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from maecho.statistics import STATISTICS
from maecho.upload.upload import Upload

OF_WEIGHTS = (
    "The trained model. Like any shared model it can be probed for whether an example was in its training data, and it "
    "can hold traces of rare ones."
)
"""What the weights can reveal, in plain words."""


def reveals(upload: Upload) -> dict[str, str]:
    """What each part can reveal, in plain words."""
    return {"weights": OF_WEIGHTS} | {name: STATISTICS[name].reveals for name in sorted(upload.has)}


@dataclass(frozen=True)
class Entry:
    """One tensor of an upload."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    rank: int | None
    """How many directions were kept. Of several covariances the largest number counts. None for a plain tensor."""


def entries(upload: Upload) -> list[Entry]:
    """Every tensor of the upload."""
    ranks: dict[str, int] = {}
    for name, value in upload.statistics.items():
        ranks |= STATISTICS[name].ranks(value)

    def entry(key: str, tensor: Tensor) -> Entry:
        part, _, name = key.partition("/")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(part, name or part, tuple(tensor.shape), dtype, tensor.nbytes, ranks.get(key.rpartition("/")[0]))

    return [entry(key, tensor) for key, tensor in upload.tensors().items()]


def averaged(upload: Upload) -> list[str]:
    """Names of the weights that belong to no layer. Every method only averages them."""
    merged = {name for layer in upload.layers for name in (layer.weight, layer.bias)}
    return upload.model_names(name for name in upload.weights if name not in merged)


def privacy(upload: Upload) -> str | None:
    """The privacy that its maker promises, in one sentence; None without a promise."""
    promise = upload.recipe.get("privacy")
    if not isinstance(promise, Mapping):
        return None
    epsilon = promise.get("epsilon")
    shown = f"{epsilon:.4g}" if isinstance(epsilon, int | float) else epsilon
    return (
        f"(ε, δ) = ({shown}, {promise.get('delta')}) for {promise.get('neighbouring')}, by noise of multiplier "
        f"{promise.get('noise')} on inputs clipped to norm {promise.get('clip')}. It covers {promise.get('covers')}"
    )


def warnings(upload: Upload) -> list[str]:
    """Sentences that the sender should read before sending. There are none with privacy, since noise hides examples."""
    if privacy(upload) is not None:
        return []
    return [text for name, value in upload.statistics.items() for text in STATISTICS[name].warnings(value, upload)]
