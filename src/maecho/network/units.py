"""The parts of a network that are fitted one after another, and which of them can be fitted at once.

A unit is a matrix: a layer, a layer together with the BatchNorm that follows it at once, or a norm's scale and shift.
Units whose inputs do not depend on each other form one stage. What depends on what is found by poisoning: weights that
are not settled yet are NaN, and a unit whose input stays clean depends on settled ones alone. That needs a forward
pass a stage and nothing from the network but that it runs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from maecho.errors import UploadError
from maecho.network import layers, norms
from maecho.network.attention import slow_path
from maecho.network.forward import call, examples
from maecho.network.layers import Layer

OUTPUT = "."
"""Of the whole network, where modules are named; none is called that."""


@dataclass(frozen=True)
class Unit:
    """One matrix [W b], and the modules that apply it."""

    layer: Layer
    modules: tuple[str, ...]
    """More than one where modules share a weight."""
    norm: str | None = None
    """The BatchNorm that follows at once: the matrix is that of both together."""
    diagonal: bool = False
    """A norm by itself."""

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def bias(self) -> bool:
        return self.layer.bias is not None or self.norm is not None

    @property
    def ends(self) -> tuple[str, ...]:
        """The modules whose outputs are what the matrix gives out."""
        return self.modules if self.norm is None else (self.norm,)

    def parameters(self, model: nn.Module) -> set[str]:
        """Names in the state_dict, running statistics among them, but no counters."""
        own = {self.layer.weight} | ({self.layer.bias} if self.layer.bias else set())
        for name in (self.norm, self.name if self.diagonal else None):
            if name is not None:
                state = model.get_submodule(name).state_dict()
                own |= {f"{name}.{key}" if name else key for key, t in state.items() if t.is_floating_point()}
        return own

    def matrix(self, model: nn.Module) -> Tensor:
        """[W b] of a model, in float64; of a BatchNorm by itself, what it does to its inputs as they come."""
        module = model.get_submodule(self.name)
        if self.diagonal:
            return torch.stack(norms.affine(module), -1).unsqueeze(1)
        W = self.layer.matrix(model.state_dict()).double()
        if self.norm is None:
            return W
        a, c = (part.reshape(*W.shape[:2], 1) for part in norms.affine(model.get_submodule(self.norm)))
        b = torch.zeros_like(c) if self.layer.bias is None else W[..., -1:]
        return torch.cat([a * (W if self.layer.bias is None else W[..., :-1]), a * b + c], -1)


@dataclass(frozen=True)
class Plan:
    """A network's units in stages."""

    stages: tuple[tuple[Unit, ...], ...]
    """The first needs nothing but the inputs; it may be empty."""
    head: str | None
    """The unit whose rows are the classes."""
    calls: Mapping[str, int]
    """How often each module ran in one pass."""


def network(model: nn.Module) -> dict[str, Unit]:
    """All units of a (split) network by name, no BatchNorm joined to anything."""
    found: dict[str, Unit] = {}
    for name, layer in layers.read(model).layers.items():
        before = found[layer.name].modules if layer.name in found else ()
        found[layer.name] = Unit(layer, (*before, name))
    for name, layer in norms.find(model).items():
        found[name] = Unit(layer, (name,), diagonal=True)
    return found


def plan(model: nn.Module, inputs: Any) -> Plan:
    """The stages of a (split) network, by a few passes over a batch of inputs. The model is left as it is."""
    if any(x.is_floating_point() and not x.isfinite().all() for x in tree_leaves(inputs) if isinstance(x, Tensor)):
        raise UploadError("the inputs must be finite, got NaN or infinity")
    model = copy.deepcopy(model).eval()
    units = network(model)
    run = _Runner(model, inputs)
    if run.dirty(()):
        raise UploadError("the network must give finite outputs for finite inputs to be planned, got NaN or infinity")
    calls = dict(run.calls)
    order = {name: unit for name in run.order for unit in units.values() if name in unit.modules}
    joined = _joined(run, {unit.name: unit for unit in order.values()})
    todo = list(dict.fromkeys(joined[unit.name] for unit in order.values() if unit.name in joined))
    state = model.state_dict()
    of_units = {name for unit in todo for name in unit.parameters(model)}
    plain = {name for name in state if name not in of_units}
    stages: list[tuple[Unit, ...]] = []
    while todo:
        unsettled = {name for unit in todo for name in unit.parameters(model)}
        dirty = run.dirty(unsettled if stages else unsettled | plain)
        stage = [unit for unit in todo if not dirty.intersection(unit.modules)]
        if not stage and stages:
            stage = [todo[0]]  # it feeds itself: a layer that is used twice in a row
        stages.append(tuple(stage))
        todo = [unit for unit in todo if unit not in stage]
    return Plan(tuple(stages), _head(run, stages), calls)


class _Runner:
    """Passes over one small batch, with what was seen on the way."""

    def __init__(self, model: nn.Module, inputs: Any):
        self.model = model
        self.inputs = _few(inputs)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.order: list[str] = []
        """Modules in order of their last call, so that a unit comes after all that it needs."""
        self.calls: dict[str, int] = {}
        self.shapes: dict[str, torch.Size] = {}
        """Of what modules gave out last."""
        self.followers: dict[str, str] = {}
        """Layer -> the BatchNorm whose input is its output, untouched."""
        self.output: Any = None
        self._watched = [name for unit in network(model).values() for name in unit.modules]

    def dirty(self, poisoned: Sequence[str] | set[str], cleaned: Sequence[str] = ()) -> set[str]:
        """Modules that see a NaN when these parameters are NaN and these modules give out zeros, or OUTPUT."""
        state = self.model.state_dict()
        kept = {name: state[name].clone() for name in poisoned}
        for name in poisoned:
            if state[name].is_floating_point():
                state[name].fill_(float("nan"))
        self.order, self.calls, self.followers = [], {}, {}
        dirty: set[str] = set()
        made: dict[int, tuple[str, Tensor, int]] = {}

        def before(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x = args[0] if args else kwargs["input"]
                if name in self.order:
                    self.order.remove(name)
                self.order.append(name)
                self.calls[name] = self.calls.get(name, 0) + 1
                if x.is_floating_point() and not x.isfinite().all():
                    dirty.add(name)
                source = made.get(id(x))
                if source and isinstance(module, norms.BATCH_NORMS) and source[2] == x._version:
                    self.followers[source[0]] = name

            return hook

        def after(name: str) -> Callable[..., Tensor | None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
                self.shapes[name] = output.shape
                if name in cleaned:
                    return torch.zeros_like(output)
                made[id(output)] = (name, output, output._version)
                return None

            return hook

        try:
            with _hooked(self.model, self._watched, before, after), torch.no_grad(), slow_path():
                self.output = call(self.model, self.inputs, self.device)
        finally:
            for name, tensor in kept.items():
                state[name].copy_(tensor)
        leaves = [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not all(leaf.isfinite().all() for leaf in leaves):
            dirty.add(OUTPUT)
        return dirty


def _joined(run: _Runner, units: dict[str, Unit]) -> dict[str, Unit]:
    """The units by name, layers joined with the BatchNorm that alone looks at what they give out."""
    once = {name for name, count in run.calls.items() if count == 1}
    pairs = {
        layer: norm
        for layer, norm in run.followers.items()
        if layer in units and norm in units and {layer, norm} <= once and len(units[layer].modules) == 1
    }
    matrices = {name for name, unit in units.items() if not (unit.layer.transposed or unit.diagonal)}
    pairs = {layer: norm for layer, norm in pairs.items() if layer in matrices}

    def alone(chosen: Mapping[str, str]) -> bool:
        poisoned = {name for layer in chosen for name in units[layer].parameters(run.model)}
        return not run.dirty(poisoned, tuple(chosen.values())) - set(chosen.values())

    if pairs and not alone(pairs):
        pairs = {layer: norm for layer, norm in pairs.items() if alone({layer: norm})}
    run.dirty(())
    return {
        name: replace(unit, norm=pairs[name]) if name in pairs else unit
        for name, unit in units.items()
        if name not in pairs.values()
    }


def _head(run: _Runner, stages: Sequence[Sequence[Unit]]) -> str | None:
    """The last layer that ran, if its rows are the model's outputs, and those hang on nothing else."""
    run.dirty(())
    matrices = {unit.modules[0]: unit for stage in stages for unit in stage if not unit.diagonal}
    last = next((matrices[name] for name in reversed(run.order) if name in matrices), None)
    if last is None or last.norm is not None or last.layer.transposed or not isinstance(run.output, Tensor):
        return None
    module = last.modules[0]
    if run.output.dim() != 2 or run.shapes[module] != run.output.shape or run.calls[module] != 1:
        return None
    everything = {name for stage in stages for unit in stage for name in unit.parameters(run.model)}
    return last.name if OUTPUT not in run.dirty(everything, (module,)) else None


def _few(inputs: Any) -> Any:
    """Two examples are enough. Of a mapping, what has no entry for each of them (a mask of places) stays whole."""
    if isinstance(inputs, Mapping):
        n = examples(inputs)
        each = {key for key, value in inputs.items() if isinstance(value, Tensor) and value.dim() and len(value) == n}
        return {key: value[:2] if key in each else value for key, value in inputs.items()}
    return inputs[:2]


@contextlib.contextmanager
def _hooked(
    model: nn.Module,
    names: Sequence[str],
    before: Callable[[str], Callable[..., None]],
    after: Callable[[str], Callable[..., Any]],
) -> Iterator[None]:
    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
