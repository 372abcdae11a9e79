"""Data through a model: what a client can say about its layers' inputs, and what its weights mean to its outputs.

One pass over the batches, with a hook before every layer that is a matrix; the hooks are gone afterwards. It goes
forward only, unless statistics of gradients are asked for. Sums are float64, so that ten million rows lose nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maecho.errors import UploadError
from maecho.linalg import recursion
from maecho.linalg.recursion import MeanRecursion
from maecho.linalg.spectra import Spectrum
from maecho.network import kinds, layers
from maecho.network.directions import Labels
from maecho.network.forward import check_labels, forward
from maecho.network.hooks import watching
from maecho.statistics.features import Features
from maecho.statistics.gaussians import Moments
from maecho.statistics.gradients import Gradients
from maecho.statistics.scatter import ClassScatter
from maecho.statistics.targets import Targets

DEFAULT_STATISTICS = ("gram", "projector", "classes", "moments", "features")
"""What is gathered unless asked otherwise."""
OF_GRADIENTS = ("fisher", "gradients")
"""Those that need backward passes."""
STATISTICS = (*DEFAULT_STATISTICS, "targets", *OF_GRADIENTS)
"""All that can be gathered; each method says which of them it needs."""


@dataclass(frozen=True)
class Gathered:
    """Everything that one pass saw, uncut."""

    examples: int
    order: tuple[str, ...]
    """Layers in order of execution; those that never ran come last."""
    ran: int
    """How many of them ran."""
    grams: dict[str, Spectrum]
    projectors: dict[str, Spectrum]
    class_counts: Tensor | None
    moments: Moments | None
    features: dict[str, Moments]
    """By the layer that they reach."""
    targets: tuple[str, Tensor] | None
    """Of the last layer, by its name."""
    fisher: dict[str, Tensor]
    gradients: dict[str, Spectrum]
    outputs: int | None
    """Length of the model's output for one example, where that is a vector."""
    notes: dict[str, str]
    """What was asked for but could not be gathered, and why."""


def gather(
    model: nn.Module,
    architecture: layers.Architecture,
    batches: Iterable[Any],
    statistics: Iterable[str],
    client: str,
    progress: bool | None = None,
    labels: Labels = "expected",
    generator: torch.Generator | None = None,
    scatter: ClassScatter | None = None,
    features: Features | None = None,
) -> Gathered:
    """One pass over a client's data."""
    wanted = set(statistics)
    backward = Gradients(model, architecture, wanted, labels, generator, client)
    graph = not wanted.isdisjoint(OF_GRADIENTS)
    targets = Targets()
    inputs = {layer.name: _Inputs(wanted, layer.one_hot) for layer in architecture.layers.values()}
    order: dict[str, None] = {}
    examples, labelled, outputs = 0, True, None
    class_counts: Tensor | None = None
    scatter, features = scatter or ClassScatter(), features or Features(model, architecture)
    notes: dict[str, str] = {}

    def look(name: str, module: nn.Module, x: Tensor) -> None:
        if backward.busy or features.busy:
            return
        layer = architecture.layers[name]
        order.setdefault(layer.name)
        inputs[layer.name].add(module, layer, x)
        if "features" in wanted:
            features.see(layer.name, x)
        if "targets" in wanted and layer.name == next(reversed(order)):
            targets.see(module, layer, x)

    with watching(model, architecture.layers, look), backward.watching() if graph else contextlib.nullcontext():
        for step in forward(model, batches, f"{client}: statistics", progress, graph):
            examples += step.size
            labelled = labelled and step.labels is not None
            outputs = step.output.shape[-1] if isinstance(step.output, Tensor) and step.output.dim() == 2 else None
            if "classes" in wanted and step.labels is not None and outputs is not None:
                counts = _count(step.labels, outputs, client)
                class_counts = counts if class_counts is None else class_counts + counts
            if "moments" in wanted:
                if not (isinstance(step.inputs, Tensor) and step.inputs.is_floating_point()):
                    notes["moments"] = "the inputs are not one tensor of real numbers, so they have no mean"
                elif scatter.shape not in (None, tuple(step.inputs.shape[1:])):
                    notes["moments"] = "the inputs are not all of one shape, so they have no mean"
                else:
                    scatter.add(step.inputs.detach(), step.labels)
            if "features" in wanted:
                features.add(step)
            if "targets" in wanted:
                targets.add(step, client)
            if graph:
                backward.add(step)
    if examples == 0:
        raise UploadError(f"{client}: the batches must hold at least one example, got none")
    if "classes" in wanted and (class_counts is None or not labelled):
        class_counts = None
        notes["classes"] = "the batches carry no whole-number label for every example"
    if "features" in wanted and features.reason:
        notes["features"] = features.reason
    if "targets" in wanted and targets.reason:
        notes["targets"] = targets.reason
    if backward.reason:
        notes |= {name: backward.reason for name in OF_GRADIENTS if name in wanted}

    state = model.state_dict()
    found = {layer.name: layer for layer in architecture.layers.values()}
    run = [*order, *(name for name in found if name not in order)]

    def spectra(make: Callable[[_Inputs, tuple[int, int, int]], Spectrum]) -> dict[str, Spectrum]:
        made = {}
        for name in run:
            try:
                made[name] = make(inputs[name], found[name].shape(state))
            except ValueError as error:
                raise UploadError(f"{client}: what reaches layer {name!r} must be {error}") from error
        return made

    return Gathered(
        examples=examples,
        order=tuple(run),
        ran=len(order),
        grams=spectra(_Inputs.gram) if "gram" in wanted else {},
        projectors=spectra(_Inputs.projector) if "projector" in wanted else {},
        class_counts=class_counts,
        moments=scatter.moments() if "moments" in wanted and "moments" not in notes else None,
        features=features.moments() if "features" in wanted else {},
        targets=targets.sums() if "targets" in wanted and not targets.reason else None,
        fisher=backward.fisher() if "fisher" in wanted and not backward.reason else {},
        gradients=backward.grams() if "gradients" in wanted and not backward.reason else {},
        outputs=outputs,
        notes=notes,
    )


class _Inputs:
    """What has reached one layer so far."""

    def __init__(self, wanted: set[str], one_hot: bool):
        self._wanted, self._one_hot = wanted, one_hot
        self._gram: Tensor | None = None  # [g, d, d], or [1, d] for one-hot rows
        self._mean: MeanRecursion | None = None

    def add(self, module: nn.Module, layer: layers.Layer, x: Tensor) -> None:
        x = x.detach()
        if kinds.unbatched(module, x):
            x = x.unsqueeze(0)
        for piece in x.split(kinds.examples_at_once(module, x)):
            self._add_gram(module, layer, piece)
        if "projector" in self._wanted and not layer.one_hot:
            for piece in x.split(recursion.MEAN_OF):
                self._add_mean(module, layer, piece)

    def _add_gram(self, module: nn.Module, layer: layers.Layer, x: Tensor) -> None:
        if "gram" not in self._wanted and not layer.one_hot:
            return
        found = kinds.rows(module, x)
        if layer.one_hot:
            gram = found[0].bincount(minlength=kinds.inputs(module)).double().unsqueeze(0).cpu()
        else:
            found = layers.complete(found, layer)
            gram = found.mT @ found
        self._gram = gram if self._gram is None else self._gram.add_(gram)

    def _add_mean(self, module: nn.Module, layer: layers.Layer, x: Tensor) -> None:
        means = layers.complete(kinds.mean_rows(module, x), layer)
        if self._mean is None:
            damping = recursion.DAMPING_CONVOLUTION if layer.convolution else recursion.DAMPING
            self._mean = MeanRecursion(means.shape[0], means.shape[2], damping)
        self._mean.add(means.cpu())  # a long chain of small products, which a GPU is no good at

    def gram(self, shape: tuple[int, int, int]) -> Spectrum:
        if self._gram is None:
            return self._nothing(shape)
        return (
            Spectrum.of_diagonal(self._gram)
            if self._gram.dim() == 2
            else Spectrum.of_dense(self._gram).to(device=torch.device("cpu"))
        )

    def projector(self, shape: tuple[int, int, int]) -> Spectrum:
        """An embedding's means are token frequencies; the exact projector says the same without a matrix."""
        if self._mean is not None:
            return self._mean.spectrum()
        if self._gram is not None and self._gram.dim() == 2:
            return self.gram(shape).projector(recursion.DAMPING)
        return self._nothing(shape)

    def _nothing(self, shape: tuple[int, int, int]) -> Spectrum:
        """Of the form that it has where something reached the layer, so that clients can be summed."""
        if self._one_hot:
            return Spectrum.of_diagonal(torch.zeros(1, shape[2], dtype=torch.float64))
        return Spectrum.zero(shape[0], shape[2])


def _count(y: Tensor, classes: int, client: str) -> Tensor:
    check_labels(y, classes, client)
    return y.cpu().bincount(minlength=classes)
