"""Finds which units of a network can be fitted at once, and in which order.

Units whose inputs do not depend on each other form one stage. Other weights show the dependencies: all weights that are
not final yet are shaken, in a copy. If the input of a unit is the same as before, the unit depends on final weights
alone. This takes a few forward passes for each stage. It works for every network that runs, also for one that would not
run on NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from maecho import devices
from maecho.errors import InputError
from maecho.linalg.finite import is_finite
from maecho.network import norms
from maecho.network.attention import slow_path
from maecho.network.batches.inputs import NOT_FINITE, examples, leaves, subset
from maecho.network.batches.reading import Read
from maecho.network.forward import call
from maecho.network.hooks import watching
from maecho.network.layers import read
from maecho.network.units import Unit, is_fitted, matrices, network
from maecho.network.verified import factors, misread
from maecho.randomness import seed_of

SHAKES = 4
"""So many other weights are tried. One alone may leave a unit's inputs as they were, behind an activation that is 0. So
the second and the fourth are the negatives of the first and the third: of a neuron and its negative, one is active."""
OUTPUT = "."
"""Among names of modules, this name stands for the output of the network. No module has it."""


@dataclass(frozen=True)
class Plan:
    """The units of a network in stages."""

    stages: tuple[tuple[Unit, ...], ...]
    """The first stage depends only on the network's inputs. It may be empty."""
    head: str | None
    """The last unit if its rows are the classes, else None."""
    calls: Mapping[str, int]
    """How often each module runs in one pass."""
    averaged: tuple[str, ...] = ()
    """What has a matrix but is only averaged: layers and norms that are no such matrices as their kind, layers of no
    known kind or on hidden states, and parameters that are multiplied outside of a layer."""
    idle: tuple[str, ...] = ()
    """Layers that do not run, so that they are only averaged."""


@devices.full_precision()
def plan(model: nn.Module, inputs: Any, outputs: Read | None = None) -> Plan:
    """Find the stages of a network, by a few passes over a batch of inputs.

    The attentions of the network must be split. The model is left as it is. `outputs` finds the scores in what the
    model returns.
    """
    if any(x.is_floating_point() and not x.isfinite().all() for x in leaves(inputs)):
        raise InputError(NOT_FINITE)
    model = copy.deepcopy(model).eval()
    run = _Runner(model, inputs, outputs)
    if run.dirty(()):
        raise InputError("the network must give finite outputs for finite inputs to be planned, got NaN or infinity")
    everything = network(model)
    with torch.no_grad(), slow_path(), misread(model, everything.values()) as wrong, factors(model) as seen:
        call(model, run.inputs, run.device, outputs)
    units = {name: unit for name, unit in everything.items() if name not in wrong}
    calls = dict(run.calls)
    order = {name: unit for name in run.order for unit in units.values() if name in unit.modules}
    ran = {unit.name for unit in order.values()}
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
            stage = [todo[0]]  # a layer that is used twice in a row depends on itself
        stages.append(tuple(stage))
        todo = [unit for unit in todo if unit not in stage]
    kinds = (f"{name} ({type(model.get_submodule(name)).__name__})" for name in sorted(wrong))
    hidden = (f"{name} (on hidden states)" for name, module in model.named_modules() if not is_fitted(module))
    architecture = read(model)
    averaged = dict.fromkeys((*kinds, *hidden, *architecture.unknown, *seen.free(model, architecture)))
    matrix = (name for name in matrices(architecture) if name in everything)
    idle = tuple(name for name in matrix if name not in ran and name not in wrong)
    return Plan(tuple(stages), _head(run, stages), calls, tuple(averaged), idle)


class _Runner:
    """Runs one small batch through the network, and keeps what the passes show."""

    def __init__(self, model: nn.Module, inputs: Any, outputs: Read | None = None):
        self.model, self._outputs = model, outputs
        self.inputs = subset(inputs, slice(2), examples(inputs))
        self.device = devices.of(model)
        self.order: list[str] = []
        """The modules in the order of their last calls. So a unit comes after everything that it depends on."""
        self.calls: dict[str, int] = {}
        self.shapes: dict[str, torch.Size] = {}
        """The shape of each module's last output."""
        self.followers: dict[str, str] = {}
        """Layer -> the BatchNorm whose input is the layer's own output, unchanged."""
        self.output: Any = None
        self._unshaken: dict[str, list[Tensor]] | None = None
        self._shaken: dict[tuple[int, str], Tensor] = {}
        """Other weights. Making them anew for every stage would take longer than the passes."""
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._watched = [name for unit in network(model).values() for name in unit.modules]

    def dirty(self, shaken: Sequence[str] | set[str], cleaned: Sequence[str] = ()) -> set[str]:
        """Modules whose inputs change when the `shaken` parameters do, while the `cleaned` modules give out zeros.

        OUTPUT is among them if the output of the network changes. Without parameters to shake, they are the modules
        whose inputs are not finite.
        """
        if not shaken or cleaned or self._unshaken is None:
            before = self._pass(cleaned)
            if not cleaned:
                self._unshaken = before
        else:
            before = self._unshaken
        if not shaken:
            return {name for name, seen in before.items() if not all(is_finite(x) for x in seen)}
        state = self.model.state_dict()
        kept = {name: state[name].clone() for name in shaken if state[name].is_floating_point()}
        found: set[str] = set()
        for seed in range(SHAKES):
            try:
                for name, tensor in kept.items():
                    parameter, key = name in self._parameters, (seed // 2, name)
                    if key not in self._shaken:
                        generator = torch.Generator().manual_seed(seed_of(f"{key[0]}/{name}"))
                        self._shaken[key] = _shaken(tensor, parameter, generator)
                    state[name].copy_((-1) ** seed * self._shaken[key] if parameter else self._shaken[key])
                after = self._pass(cleaned)
            finally:
                for name, tensor in kept.items():
                    state[name].copy_(tensor)
            found |= {name for name, seen in before.items() if not _same(seen, after.get(name, []))}
        return found

    def _pass(self, cleaned: Sequence[str]) -> dict[str, list[Tensor]]:
        """The inputs of every module, call by call, and the outputs of the network."""
        self.order, self.calls, self.followers = [], {}, {}
        seen: dict[str, list[Tensor]] = {}
        made: dict[int, tuple[str, Tensor, int]] = {}

        def before(name: str, module: nn.Module, x: Tensor) -> None:
            if name in self.order:
                self.order.remove(name)
            self.order.append(name)
            self.calls[name] = self.calls.get(name, 0) + 1
            seen.setdefault(name, []).append(x.detach().clone())
            source = made.get(id(x))
            if source and isinstance(module, norms.BatchNorm) and source[2] == x._version:
                self.followers[source[0]] = name

        def after(name: str, module: nn.Module, x: Tensor, z: Tensor) -> Tensor | None:
            self.shapes[name] = z.shape
            if name in cleaned:
                return torch.zeros_like(z)
            made[id(z)] = (name, z, z._version)
            return None

        with watching(self.model, self._watched, before, after), torch.no_grad(), slow_path():
            self.output = call(self.model, self.inputs, self.device, self._outputs)
        seen[OUTPUT] = [leaf.clone() for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)]
        return seen


def _shaken(tensor: Tensor, parameter: bool, generator: torch.Generator) -> Tensor:
    """Other numbers of the same size. Buffers keep their signs, since one may be a variance."""
    factor = 1 + torch.rand(tensor.shape, generator=generator).to(tensor)
    if not parameter:
        return factor * tensor
    size = float(tensor.abs().mean()) if tensor.numel() else 0.0
    return max(size, 0.1) * torch.randn(tensor.shape, generator=generator).to(tensor)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two passes gave the same, but for rounding on a GPU."""
    return len(one) == len(other) and all(
        a.shape == b.shape and bool((a == b).all() or torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9))
        for a, b in zip(one, other, strict=True)
    )


def _joined(run: _Runner, units: dict[str, Unit]) -> dict[str, Unit]:
    """The units by name. A layer is joined with a BatchNorm if nothing else reads the layer's output."""
    once = {name for name, count in run.calls.items() if count == 1}
    pairs = {
        layer: norm
        for layer, norm in run.followers.items()
        if layer in units and norm in units and {layer, norm} <= once and len(units[layer].modules) == 1
    }
    matrices = {name for name, unit in units.items() if not (unit.layer.one_hot or unit.diagonal)}
    pairs = {layer: norm for layer, norm in pairs.items() if layer in matrices}

    def alone(chosen: Mapping[str, str]) -> bool:
        shaken = {name for layer in chosen for name in units[layer].parameters(run.model)}
        return not run.dirty(shaken, tuple(chosen.values())) - set(chosen.values())

    if pairs and not alone(pairs):
        pairs = {layer: norm for layer, norm in pairs.items() if alone({layer: norm})}
    run.dirty(())
    return {
        name: replace(unit, norm=pairs[name]) if name in pairs else unit
        for name, unit in units.items()
        if name not in pairs.values()
    }


def _head(run: _Runner, stages: Sequence[Sequence[Unit]]) -> str | None:
    """The last layer that ran, if its rows are the model's outputs and these depend on no other layer directly."""
    run.dirty(())
    matrices = {unit.modules[0]: unit for stage in stages for unit in stage if not unit.diagonal}
    last = next((matrices[name] for name in reversed(run.order) if name in matrices), None)
    if last is None or last.norm is not None or last.layer.one_hot or not isinstance(run.output, Tensor):
        return None
    module = last.modules[0]
    if run.output.dim() != 2 or run.shapes[module] != run.output.shape or run.calls[module] != 1:
        return None
    everything = {name for stage in stages for unit in stage for name in unit.parameters(run.model)}
    return last.name if OUTPUT not in run.dirty(everything, (module,)) else None
