"""The client's side: a trained model and its data in, one Upload out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from maecho.errors import UploadError
from maecho.linalg import recursion
from maecho.network import layers
from maecho.network.directions import LABELS, Labels
from maecho.network.spaces import Spaces
from maecho.network.tracing import derive
from maecho.privacy import Privacy
from maecho.statistics.features import Features
from maecho.statistics.gather import DEFAULT_STATISTICS, STATISTICS, gather
from maecho.statistics.gaussians import COVARIANCES, Covariance
from maecho.statistics.noise import ALLOWED, gather_privately
from maecho.statistics.scatter import ClassScatter
from maecho.upload import size as compression
from maecho.upload.upload import Upload


def make_upload(
    model: nn.Module,
    batches: Iterable[Any],
    client: str,
    statistics: Iterable[str] | None = None,
    rank: int | float | str | None = "4x",
    progress: bool | None = None,
    labels: Labels = "expected",
    generator: torch.Generator | None = None,
    gaussians: int = 1,
    covariance: Covariance = "class",
    privacy: Privacy | None = None,
) -> Upload:
    """What this client sends: the model's weights, and statistics of its layers' inputs on these batches.

    Args:
        model: the trained model. It comes back as it was.
        batches: (inputs, labels), (inputs, anything) or inputs alone, gone through once. The projector of the paper's
            release is made of means of batches of 64 examples; larger batches are cut into such.
        client: the client's name, unlike the others'.
        statistics: what to send. By default "gram", "projector", "classes", "moments" and "features" (moments of what
            reaches the first fully connected layer behind others), which are gathered going forward only. On demand:
            "targets" (sums of the last layer's inputs by class, for AFL), "fisher" (one number a weight, as large as
            the weights) and "gradients" (one matrix a layer), which both need backward passes.
            With privacy there are "moments" and "classes" alone, which are then the default.
        rank: how far Grams, projectors and covariances are cut down: a number of directions (64), a share of their
            energy (0.999), a size for the whole upload ("5 MB", or "3x" what cannot be cut: weights, counts and class
            means, "fisher" and "targets"), or None for no cut. A size keeps the largest share of energy that fits.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        labels: which labels the gradients behind "fisher" and "gradients" are of: "expected" over the model's own
            predictions (exact, one backward pass a class, no labels needed), "sampled" (one random combination of them
            an example: the same on average, one backward pass, for models of many classes) or "observed" (the
            batches' labels: the empirical Fisher).
        generator: of the random signs of "sampled".
        gaussians: how many a class the "moments" hold, found by k-means: more follow the data closer and are larger.
        covariance: of "moments" and "features": one for every "class" (every Gaussian), or one "shared" by all, which
            is smaller.
        privacy: noise on all that is said of the data, the number of examples among it; the weights are not covered.
    """
    if statistics is None:
        statistics = DEFAULT_STATISTICS if privacy is None else ALLOWED
    if isinstance(statistics, str):
        raise UploadError(
            f"{client}: statistics must be a list from {', '.join(STATISTICS)}, got the text {statistics!r}"
        )
    wanted = tuple(statistics)
    for name in wanted:
        if name not in STATISTICS:
            raise UploadError(f"{client}: statistics must be among {', '.join(STATISTICS)}, got {name!r}")
    if labels not in LABELS:
        raise UploadError(f"{client}: labels must be one of {', '.join(LABELS)}, got {labels!r}")
    if labels == "sampled" and generator is None:
        raise UploadError(f"{client}: labels='sampled' must come with a generator, got none")
    if isinstance(gaussians, bool) or not isinstance(gaussians, int) or gaussians < 1:
        raise UploadError(f"{client}: gaussians must be a whole number from 1 on, got {gaussians!r}")
    if covariance not in COVARIANCES:
        raise UploadError(f"{client}: covariance must be one of {', '.join(COVARIANCES)}, got {covariance!r}")
    if privacy is not None and gaussians > 1:
        raise UploadError(f"{client}: with privacy there must be one Gaussian a class, got gaussians={gaussians}")
    promise = {} if privacy is None else {"privacy": privacy.recipe()}
    rule = compression.parse(rank)
    architecture = layers.read(model)
    if architecture.unknown:
        warnings.warn(
            f"averaged without statistics, not being known as matrices: {', '.join(architecture.unknown)}",
            stacklevel=2,
        )
    weights = _weights(model, architecture, client)
    if privacy is None:
        scatter = ClassScatter(gaussians, covariance)
        features = Features(model, architecture, covariance)
        gathered = gather(model, architecture, batches, wanted, client, progress, labels, generator, scatter, features)
    else:
        gathered = gather_privately(model, architecture, batches, wanted, client, privacy, covariance, progress)
    by_name = {layer.name: layer for layer in architecture.layers.values()}
    order = tuple(by_name[name] for name in gathered.order)
    head = _head(order[: gathered.ran], weights, gathered.outputs)
    targets, notes = gathered.targets, dict(gathered.notes)
    if targets is not None and targets[0] != head:
        targets, notes["targets"] = None, "the model has no last layer of one row a class"
    spaces = _spaces(model, notes)
    upload = Upload(
        client=client,
        examples=gathered.examples,
        weights=weights,
        layers=order,
        head=head,
        aliases=architecture.aliases,
        spaces=spaces,
        grams=gathered.grams,
        projectors=gathered.projectors,
        class_counts=gathered.class_counts,
        moments=gathered.moments,
        features=gathered.features,
        targets=None if targets is None else targets[1],
        fisher=gathered.fisher,
        gradients=gathered.gradients,
        recipe={
            "statistics": list(wanted),
            "rank": rank,
            "gram": "sum of x xᵀ over the inputs x of the layer, a bias being one more input that is always 1",
            "projector": f"recursion on means of at most {recursion.MEAN_OF} examples, step {recursion.STEP}, damping "
            f"{recursion.DAMPING:.4g} ({recursion.DAMPING_CONVOLUTION:.4g} for convolutions)",
            "moments": f"count, mean and covariance of the raw inputs, class by class, Gaussians a class: {gaussians}, "
            f"covariance: {covariance}",
            "features": "the same, one Gaussian a class, of what reaches the layer named",
            "targets": "sum of the inputs of the last layer, class by class",
            "fisher": f"sum over examples of squared gradients of log p(y|x), labels {labels}",
            "gradients": f"sum of g gᵀ over the gradients g of log p(y|x) at the layer's outputs, labels {labels}",
            "not_sent": notes,
            "unknown": list(architecture.unknown),
            **promise,
        },
    )
    return compression.cut(upload, rule)


def _spaces(model: nn.Module, notes: dict[str, str]) -> Spaces | None:
    """The neuron spaces, or a note why there are none: matching alone needs them, the upload is good without."""
    # A copy is traced, since tracing runs forward(), which may change buffers; its parameters are the model's own.
    try:
        twin = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    except Exception as error:  # a model may refuse to be copied in any way
        notes["spaces"] = f"{type(model).__name__} cannot be copied to be traced ({' '.join(str(error).split())})"
        return None
    try:
        return derive(twin)
    except UploadError as error:
        notes["spaces"] = str(error)
        return None


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
    return order[-1].name if groups == 1 and out == outputs and not order[-1].one_hot else None
