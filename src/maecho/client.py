"""The client's side: a trained model and its data in, one Upload out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from maecho import compression, layers, recursion
from maecho.errors import UploadError
from maecho.statistics import STATISTICS, gather
from maecho.upload import Upload


def make_upload(
    model: nn.Module,
    batches: Iterable[Any],
    client: str,
    statistics: Iterable[str] = STATISTICS,
    rank: int | float | str | None = "4x",
    progress: bool | None = None,
) -> Upload:
    """What this client sends: the model's weights, and statistics of its layers' inputs on these batches.

    Args:
        model: the trained model. It comes back as it was.
        batches: (inputs, labels), (inputs, anything) or inputs alone, gone through once. The projector of the paper's
            release is made of means of batches of 64 examples; larger batches are cut into such.
        client: the client's name, unlike the others'.
        statistics: which of "gram", "projector", "classes", "moments" to send; by default all, so that every one-shot
            method can be used.
        rank: how far Grams, projectors and covariances are cut down: a number of directions (64), a share of their
            energy (0.999), a size for the whole upload ("5 MB", or "3x" what cannot be cut: weights, counts and class
            means), or None for no cut. A size keeps the largest share of energy that fits.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
    """
    if isinstance(statistics, str):
        raise UploadError(
            f"{client}: statistics must be a list from {', '.join(STATISTICS)}, got the text {statistics!r}"
        )
    wanted = tuple(statistics)
    for name in wanted:
        if name not in STATISTICS:
            raise UploadError(f"{client}: statistics must be among {', '.join(STATISTICS)}, got {name!r}")
    rule = compression.parse(rank)
    architecture = layers.read(model)
    if architecture.unknown:
        warnings.warn(
            f"averaged without statistics, not being known as matrices: {', '.join(architecture.unknown)}",
            stacklevel=2,
        )
    weights = _weights(model, architecture, client)
    gathered = gather(model, architecture, batches, wanted, client, progress)
    by_name = {layer.name: layer for layer in architecture.layers.values()}
    order = tuple(by_name[name] for name in gathered.order)
    upload = Upload(
        client=client,
        examples=gathered.examples,
        weights=weights,
        layers=order,
        head=_head(order[: gathered.ran], weights, gathered.outputs),
        aliases=architecture.aliases,
        grams=gathered.grams,
        projectors=gathered.projectors,
        class_counts=gathered.class_counts,
        moments=gathered.moments,
        recipe={
            "statistics": list(wanted),
            "rank": rank,
            "gram": "sum of x xᵀ over the inputs x of the layer, a bias being one more input that is always 1",
            "projector": f"recursion on means of at most {recursion.MEAN_OF} examples, step {recursion.STEP}, damping "
            f"{recursion.DAMPING:.4g} ({recursion.DAMPING_CONVOLUTION:.4g} for convolutions)",
            "moments": "count, mean and covariance of the raw inputs, class by class",
            "not_sent": gathered.notes,
            "unknown": list(architecture.unknown),
        },
    )
    return compression.cut(upload, rule)


def _weights(model: nn.Module, architecture: layers.Architecture, client: str) -> dict[str, Tensor]:
    weights = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UploadError(
                f"{client}: every entry of the state_dict must be a tensor, got {name!r}: {type(value).__name__}"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise UploadError(f"{client}: weight {name!r} must be finite, got NaN or infinity")
        if name not in architecture.aliases:
            weights[name] = value.detach().to("cpu", copy=True)
    return weights


def _head(order: tuple[layers.Layer, ...], weights: dict[str, Tensor], outputs: int | None) -> str | None:
    """The last layer that ran, if its rows are the model's outputs."""
    if not order or outputs is None:
        return None
    groups, out, _ = order[-1].shape(weights)
    return order[-1].name if groups == 1 and out == outputs and not order[-1].transposed else None
