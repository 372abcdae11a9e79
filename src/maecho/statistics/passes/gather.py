"""Runs a client's data through its model once and gathers every statistic that is wanted.

The pass is forward only, unless a statistic needs gradients. Sums are float64, so that they stay accurate over ten
million rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from maecho import devices
from maecho.errors import InputError
from maecho.network.attention import slow_path
from maecho.network.batches.inputs import few
from maecho.network.batches.labels import NO_LABELS, complaint
from maecho.network.batches.reading import Reader
from maecho.network.forward import Pass, forward
from maecho.network.hooks import watching
from maecho.network.layers import Architecture, Layer
from maecho.network.packed.linears import Split
from maecho.network.units import matrices
from maecho.network.verified import Peeked, factors, misread, without
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
    architecture: Architecture
    """The layers that are what they are read as."""
    idle: tuple[str, ...]
    """The layers that never ran, so that nothing is known of their inputs."""
    inputs: Any
    """The inputs of a few examples, on which the neuron spaces are tried. They are not sent."""
    remade: Callable[[float | None], dict[str, Value]] = lambda room: {}
    """Makes the values again, with another `Found.room`."""


def gather(
    setting: Setting, batches: Iterable[Any], statistics: Sequence[Statistic], progress: bool | None = None
) -> Gathered:
    """Go through the data once. The model is left unchanged.

    The first batch shows which layers are not what they are read as. If there are any, it is gone through again without
    them.
    """
    reader = setting.reader or Reader(setting.model, setting.client)
    setting = replace(setting, reader=reader)
    rest = batches if isinstance(batches, Peeked) else Peeked(batches, reader)
    if rest.first is None:
        raise InputError(f"{setting.client}: the batches must hold at least one example, got none")
    units = matrices(setting.architecture).values()
    going = _Going(setting, reader, statistics)
    with misread(setting.model, units, setting.watch) as wrong, factors(setting.model, setting.watch) as seen:
        try:
            going.over([rest.first], progress=False)
        except InputError:  # statistics may fail at a layer that is not what it is read as
            with contextlib.suppress(InputError):
                list(forward(setting.model, [rest.first], setting.client, False, reader=reader))
            if not wrong:
                raise
    if wrong:
        setting = replace(setting, architecture=without(setting.architecture, wrong, setting.model))
        going = _Going(setting, reader, statistics)
        with devices.full_precision():
            going.over([rest.first], progress=False)
    going.over(rest, progress)
    free = seen.free(setting.model, setting.architecture)
    architecture = replace(setting.architecture, unknown=(*setting.architecture.unknown, *free))
    return replace(going.gathered(), architecture=architecture)


class _Going:
    """A pass over the data that is under way."""

    def __init__(self, setting: Setting, reader: Reader, statistics: Sequence[Statistic]):
        self._setting, self._reader = setting, reader
        self._gatherers = {statistic.name: statistic.gatherer(setting) for statistic in statistics}
        looking_back = [g for g in self._gatherers.values() if isinstance(g, BackwardGatherer)]
        self._graph = bool(looking_back)
        self._backward = BackwardPasses(setting, looking_back)
        self._order: dict[str, None] = {}
        self._examples = 0
        self._outputs: int | None = None
        self._inputs: Any = None
        self._unlabelled = 0

    def over(self, batches: Iterable[Any], progress: bool | None) -> None:
        setting, gatherers = self._setting, self._gatherers.values()

        def see(name: str, module: nn.Module, x: Tensor) -> None:
            layer = setting.architecture.layers[name]
            self._order.setdefault(layer.name)
            for gatherer in gatherers:
                gatherer.see(layer, module, x)

        def expect(examples: int) -> None:
            for gatherer in gatherers:
                gatherer.expect(examples)

        with (
            slow_path(),
            watching(setting.model, setting.architecture.layers, before=see, watch=setting.watch),
            self._backward.watching() if self._graph else contextlib.nullcontext(),
        ):
            label = f"{setting.client}: statistics"
            steps = forward(setting.model, batches, label, progress, self._graph, self._reader, before=expect)
            for step in map(_of_classes, steps):
                if gatherers and step.no_labels not in ("", NO_LABELS):
                    self._reader.lost_labels(step.no_labels)
                self._unlabelled += step.size if step.no_labels == NO_LABELS else 0
                if not self._examples:
                    self._inputs = few(step.inputs)
                self._examples += step.size
                vector = isinstance(step.output, Tensor) and step.output.dim() == 2
                self._outputs = step.output.shape[-1] if vector else None
                for gatherer in gatherers:
                    gatherer.add(step)
                if self._graph:
                    self._backward.add(step)

    def gathered(self) -> Gathered:
        setting = self._setting
        found = replace(_found(setting, list(self._order), self._examples, self._outputs), room=setting.room)
        if 0 < self._unlabelled < self._examples:
            self._reader.lost_labels(f"{self._unlabelled} of {self._examples} examples carry none")
        idle = tuple(layer.name for layer in found.layers if layer.name not in self._order)
        if idle and not self._order:
            raise InputError(
                f"{setting.client}: some layer must run in a pass over the batches, got none of {', '.join(idle)}"
            )
        missing: dict[str, str] = {}

        def made(room: float | None) -> dict[str, Value]:
            values = {}
            for name, gatherer in self._gatherers.items():
                try:
                    values[name] = gatherer.value(replace(found, room=room))
                except NotGathered as reason:
                    missing[name] = str(reason)
            return values

        return Gathered(found, made(setting.room), missing, setting.architecture, idle, self._inputs, made)


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
    head = _head(layers[: len(ran)], weights, outputs)
    if head is not None and _in_split(setting.model, head):
        head = None  # its rows are gates of a recurrence or features of an attention
    return Found(examples, layers, head, outputs, weights)


def _in_split(model: nn.Module, layer: str) -> bool:
    return isinstance(model.get_submodule(layer.rpartition(".")[0]), Split)


def _head(ran: Sequence[Layer], weights: dict[str, Tensor], outputs: int | None) -> str | None:
    """The name of the last layer that ran, if it has one row for each of the model's outputs."""
    if not ran or outputs is None:
        return None
    groups, out, _ = ran[-1].shape(weights)
    return ran[-1].name if groups == 1 and out == outputs and not ran[-1].one_hot else None
