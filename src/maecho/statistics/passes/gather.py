"""Runs a client's data through its model once and gathers every statistic that is wanted.

The pass is forward only, unless a statistic needs gradients. Sums are float64, so that they stay accurate over ten
million rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from maecho.errors import InputError
from maecho.network.batches.labels import NO_LABELS, complaint
from maecho.network.batches.reading import Reader
from maecho.network.forward import Pass, forward
from maecho.network.hooks import watching
from maecho.network.layers import Layer
from maecho.statistics.of_gradients import BackwardGatherer
from maecho.statistics.parts import Value
from maecho.statistics.passes.backward import BackwardPasses
from maecho.statistics.statistic import Found, NotGathered, Setting, Statistic


@dataclass(frozen=True)
class Gathered:
    """The result of one pass, before statistics are cut to a size."""

    found: Found
    values: dict[str, Value]
    """Name of the statistic -> its value."""
    missing: dict[str, str]
    """Name of a statistic that could not be gathered -> the reason."""
    idle: tuple[str, ...] = ()
    """The layers that never ran, so that nothing is known of their inputs."""


def gather(
    setting: Setting, batches: Iterable[Any], statistics: Sequence[Statistic], progress: bool | None = None
) -> Gathered:
    """Go through the data once. The model is left unchanged."""
    client, model, architecture = setting.client, setting.model, setting.architecture
    reader = setting.reader or Reader(model, client)
    gatherers = {statistic.name: statistic.gatherer(setting) for statistic in statistics}
    backward = BackwardPasses(setting, [g for g in gatherers.values() if isinstance(g, BackwardGatherer)])
    graph = any(isinstance(g, BackwardGatherer) for g in gatherers.values())
    order: dict[str, None] = {}
    examples, outputs, unlabelled = 0, None, 0

    def see(name: str, module: nn.Module, x: Tensor) -> None:
        layer = architecture.layers[name]
        order.setdefault(layer.name)
        for gatherer in gatherers.values():
            gatherer.see(layer, module, x)

    with (
        watching(model, architecture.layers, before=see, watch=setting.watch),
        backward.watching() if graph else contextlib.nullcontext(),
    ):
        for step in forward(model, batches, f"{client}: statistics", progress, graph, reader):
            step = _of_classes(step)
            if gatherers and step.no_labels not in ("", NO_LABELS):
                reader.lost_labels(step.no_labels)
            examples += step.size
            unlabelled += step.size if step.no_labels == NO_LABELS else 0
            outputs = step.output.shape[-1] if isinstance(step.output, Tensor) and step.output.dim() == 2 else None
            for gatherer in gatherers.values():
                gatherer.add(step)
            if graph:
                backward.add(step)
    if examples == 0:
        raise InputError(f"{client}: the batches must hold at least one example, got none")
    if 0 < unlabelled < examples:
        reader.lost_labels(f"{unlabelled} of {examples} examples carry none")
    found = _found(setting, list(order), examples, outputs)
    values, missing = {}, {}
    for name, gatherer in gatherers.items():
        try:
            values[name] = gatherer.value(found)
        except NotGathered as reason:
            missing[name] = str(reason)
    idle = tuple(layer.name for layer in found.layers if layer.name not in order)
    return Gathered(found, values, missing, idle)


def _of_classes(step: Pass) -> Pass:
    """The same batch, without its labels if they are not all classes of the model."""
    if step.labels is None or not (isinstance(step.output, Tensor) and step.output.dim() == 2):
        return step
    wrong = complaint(step.labels, step.output.shape[-1])
    return replace(step, labels=None, no_labels=wrong) if wrong else step


def _found(setting: Setting, ran: Sequence[str], examples: int, outputs: int | None) -> Found:
    by_name = {layer.name: layer for layer in setting.architecture.layers.values()}
    weights = setting.model.state_dict()
    layers = tuple(by_name[name] for name in [*ran, *(name for name in by_name if name not in ran)])
    return Found(examples, layers, _head(layers[: len(ran)], weights, outputs), outputs, weights)


def _head(ran: Sequence[Layer], weights: dict[str, Tensor], outputs: int | None) -> str | None:
    """The name of the last layer that ran, if it has one row for each of the model's outputs."""
    if not ran or outputs is None:
        return None
    groups, out, _ = ran[-1].shape(weights)
    return ran[-1].name if groups == 1 and out == outputs and not ran[-1].one_hot else None
