"""The statistic "features": moments of the inputs of one layer.

That layer is the first fully connected layer after other layers, if no shortcut leads past it. For the layers from
there on, these moments play the same part as the moments of raw inputs for the whole network.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.errors import UploadError
from maecho.linalg.gaussians import Gaussians
from maecho.network import kinds
from maecho.network.attention import slow_path
from maecho.network.batches.reading import Read
from maecho.network.forward import Pass, call
from maecho.network.hooks import remove_all, watching
from maecho.network.layers import Architecture, Layer
from maecho.network.spaces import Move, Place
from maecho.statistics.moments import NO_MEAN, ClassScatter, check_gaussians
from maecho.statistics.parts import GAUSSIANS
from maecho.statistics.statistic import Carrier, Found, Gatherer, NotGathered, Options, Setting, Statistic

NO_NARROW_LAYER = "the network has no fully connected layer after others that no shortcut leads past"


class Features(Statistic):
    """A mapping: name of the layer -> one Gaussian for each class."""

    name = "features"
    reveals = (
        "The average of what reaches one layer, class by class, and how it varies: what the network makes of the "
        "inputs. Harder to turn back into inputs than moments of these, not safe from it."
    )
    kind = GAUSSIANS
    by_name = True
    by_default = additive = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _AtTheNarrowLayer(setting)

    def recipe(self, options: Options) -> str:
        return "count, mean and covariance of the inputs of one layer, class by class, one Gaussian for each class"

    def check(self, value: Any, carrier: Carrier) -> Any:
        client, by_name = carrier.client, {layer.name: layer for layer in carrier.layers}
        moments = carrier.statistics.get("moments")
        for name, found in value.items():
            if name not in by_name:
                raise UploadError(f"{client}: features must be of a layer of the network, got features of {name!r}")
            groups, _, d = by_name[name].shape(carrier.weights)
            d -= by_name[name].bias is not None
            if groups > 1 or not isinstance(found, Gaussians) or found.shape != (d,):
                got = found.shape if isinstance(found, Gaussians) else type(found).__name__
                raise UploadError(f"{client}: features of {name!r} must be of its {groups * d} inputs, got {got}")
            check_gaussians(found, carrier, f" of {name!r}")
            classes = found.classes.tolist()
            own = set(moments.classes.tolist()) if isinstance(moments, Gaussians) else None
            if len(classes) > len(set(classes)) or (own is not None and set(classes) != own):
                raise UploadError(
                    f"{client}: features of {name!r} must be one Gaussian for each class that the client has, got "
                    f"classes {classes}"
                )
        return value

    def moved(self, value: Any, carrier: Carrier, move: Move) -> Any:
        out = dict(value)
        for layer in move.layers(carrier.layers, outputs=False):
            if layer.name in out:
                out[layer.name] = _moved(out[layer.name], layer, move)
        return out


def _moved(found: Gaussians, layer: Layer, move: Move) -> Gaussians:
    """Map the means by M, and the covariances by M on both sides. The residual variances are mapped as if the entries
    were uncorrelated."""
    place = Place(layer.weight, 1, found.means.shape[1] // move.space.size)
    plain = replace(layer, bias=None)
    return replace(
        found,
        means=move.carry(found.means, place),
        covariances=tuple(move.dense_inputs(covariance, plain) for covariance in found.covariances),
        residual=None if found.residual is None else move.carry(found.residual, place, move.M**2),
    )


class _AtTheNarrowLayer(Gatherer):
    """Sums up the inputs of the narrow layer, which it finds in the first batch."""

    def __init__(self, setting: Setting):
        self._setting = setting
        self._scatter = ClassScatter(1, setting.options.covariance)
        self._seen: dict[str, Tensor] = {}
        self._layer: str | None = None
        self._reason = ""

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        if self._layer in (None, layer.name) and not self._reason:
            self._seen[layer.name] = x.detach().clone()  # a later module may write into it

    def add(self, step: Pass) -> None:
        if self._layer is None and not self._reason:
            self._find(step)
        if self._layer is not None:
            x = self._seen[self._layer]
            if x.shape[0] != step.size:
                self._layer, self._reason = None, "the network is narrow for some batches and not for others"
            else:
                self._scatter.add(x, step.labels)
        self._seen.clear()

    def _find(self, step: Pass) -> None:
        setting = self._setting
        with setting.watch.pause():
            self._layer = narrow(setting.model, setting.architecture, step.inputs, self._seen, setting.outputs)
        if self._layer is None:
            real = isinstance(step.inputs, Tensor) and step.inputs.is_floating_point()
            self._reason = NO_NARROW_LAYER if real else NO_MEAN

    def value(self, found: Found) -> dict[str, Gaussians]:
        if self._layer is None or self._reason:
            raise NotGathered(self._reason)
        return {self._layer: self._scatter.moments(found.enough)}


def narrow(
    model: nn.Module, architecture: Architecture, inputs: Any, seen: Mapping[str, Tensor], outputs: Read | None = None
) -> str | None:
    """The first fully connected layer that no other path leads past. The very first layer does not count.

    To test a layer, the network gets other inputs, and the layer gets what it saw before. If the output is the same as
    before, nothing leads past the layer. A copy is run, since a forward may change buffers.

    Args:
        model: the model. It is not changed.
        architecture: the architecture of the model.
        inputs: a batch.
        seen: the input of each layer when the model ran this batch, in order of execution.
        outputs: finds the scores in what the model returns.
    """
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        return None
    modules: dict[str, list[str]] = {}
    for name, layer in architecture.layers.items():
        modules.setdefault(layer.name, []).append(name)
    candidates = [
        name
        for name in list(seen)[1:]
        if len(modules[name]) == 1
        and architecture.layers[name].one_row_each(seen[name], len(inputs))
        and not kinds.built(model.get_submodule(name))
    ]
    if not candidates:
        return None
    with contextlib.suppress(Exception):  # copying a model, and running it on other inputs, may raise anything
        twin = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
        remove_all(twin)
        device = devices.of(model)
        with torch.no_grad(), slow_path():
            before = call(twin, inputs, device, outputs)
            other = next((x for x in _others(inputs) if not _same(call(twin, x, device, outputs), before)), None)
            if other is None:
                return None
            return next((name for name in candidates if _leads(twin, name, seen[name], other, before, outputs)), None)
    return None


def _others(inputs: Tensor) -> Iterator[Tensor]:
    """Inputs that the network can take as well: the same examples in another order, and the same at half the size."""
    yield inputs.roll(1, 0)
    yield 0.5 * inputs


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape):
        return False
    return bool((one - other).abs().max() <= 1e-5 * other.abs().max())


def _leads(model: nn.Module, name: str, seen: Tensor, other: Tensor, before: Tensor, outputs: Read | None) -> bool:
    """Whether the output is as before when the network gets other inputs and the layer what it saw before."""
    calls: list[None] = []

    def enter(name: str, module: nn.Module, x: Tensor) -> Tensor:
        calls.append(None)
        return seen.clone()

    with watching(model, [name], enter):
        found = call(model, other, devices.of(model), outputs)
    return len(calls) == 1 and _same(found, before)
