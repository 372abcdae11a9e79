"""Which axes of which parameters are the same neurons: the symmetry of an architecture, as data.

A space is a set of neurons and all the places where they occur. Permuting the neurons of one space in all its places
leaves the network's outputs as they were. tracing.py finds the spaces of a network; they can also be written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.errors import InputError
from maecho.linalg.finite import is_finite
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal
from maecho.network import kinds
from maecho.network.batches.inputs import arguments
from maecho.network.forward import evaluating
from maecho.network.layers import Layer

TOLERANCE = 1e-4
"""How far outputs may move, relative to their norm, when the neurons of a space are permuted."""
ROUNDINGS = 8
"""The same in roundings of the network's own precision, if that is more."""


@dataclass(frozen=True)
class Place:
    """One axis of one tensor. After a map was flattened, each neuron has a block of neighbouring entries there."""

    tensor: str
    axis: int
    block: int = 1


@dataclass(frozen=True)
class Space:
    """Neurons that are permuted together, in all their places."""

    name: str
    size: int
    places: tuple[Place, ...]


Spaces = tuple[Space, ...]


def permute(weights: Mapping[str, Tensor], spaces: Iterable[Space], orders: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same network with the neurons of each space in another order: new neuron k is old neuron order[k]."""
    out = dict(weights)
    for space in spaces:
        if space.name in orders:
            for place in space.places:
                out[place.tensor] = take(out[place.tensor], place, orders[space.name])
    return out


def take(tensor: Tensor, place: Place, order: Tensor) -> Tensor:
    """The tensor with the neurons of one place in another order."""
    blocks = tensor.unflatten(place.axis, (-1, place.block))
    taken: Tensor = blocks.index_select(place.axis, order.to(tensor.device)).flatten(place.axis, place.axis + 1)
    return taken


@dataclass(frozen=True)
class Move:
    """Maps the neurons of one space by M: row a of M says of which old neurons the new neuron a is made.

    What was x becomes M x. So a weight W becomes W Mᵀ on its inputs and M W on its outputs, and the Gram matrix of x
    becomes M G Mᵀ.
    """

    space: Space
    M: Tensor

    @cached_property
    def order(self) -> Tensor | None:
        """The old neuron at the place of each new one, if M is a permutation. None if M mixes neurons."""
        return self.M.argmax(1) if bool(((self.M == 0) | (self.M == 1)).all()) else None

    def carry(self, tensor: Tensor, place: Place, M: Tensor | None = None) -> Tensor:
        """Map the neurons of one place of a tensor. If M mixes neurons and another `M` is given, that one is used."""
        if self.order is not None:
            return take(tensor, place, self.order)
        return carry(tensor, place, self.M if M is None else M)

    def layers(self, network: Iterable[Layer], *, outputs: bool) -> Iterator[Layer]:
        """The layers whose outputs are neurons of the space, or whose inputs are."""
        by_weight = {layer.weight: layer for layer in network}
        for place in self.space.places:
            layer = by_weight.get(place.tensor)
            if layer is None:
                continue
            is_output = place.axis == layer.out_axis
            # In a depthwise layer each output channel has one input channel, so its outputs stand for its inputs, too.
            if is_output if outputs else (not is_output or layer.groups > 1):
                yield layer

    def inputs(self, matrix: Spectrum | Diagonal, layer: Layer) -> Spectrum | Diagonal:
        """M A Mᵀ for the inputs of a layer. The bias is the last input and stays. In a grouped layer, groups are
        permuted."""
        if layer.groups > 1:
            return self._groups(matrix, f"layer {layer.name!r} has groups, which entropic transport cannot mix")
        if isinstance(matrix, Diagonal):
            raise InputError(f"layer {layer.name!r} has tokens as inputs, which cannot be permuted")
        return self.dense_inputs(matrix, layer)

    def dense_inputs(self, matrix: Spectrum, layer: Layer) -> Spectrum:
        """M A Mᵀ for the inputs of a layer without groups."""
        matrix = matrix if self.order is not None else matrix.completed()
        U, bias = matrix.basis, int(layer.bias is not None)
        inner = U[:, : U.shape[1] - bias]
        carried = self.carry(inner, Place(layer.weight, 1, inner.shape[1] // self.space.size))
        return self._carried(matrix, torch.cat([carried, U[:, U.shape[1] - bias :]], 1))

    def outputs(self, matrix: Spectrum, layer: Layer) -> Spectrum | Diagonal:
        """M A Mᵀ for the outputs of a layer."""
        if layer.groups > 1:
            return self._groups(matrix, f"layer {layer.name!r} has outputs that entropic transport cannot mix")
        matrix = matrix if self.order is not None else matrix.completed()
        return self._carried(matrix, self.carry(matrix.basis, Place(layer.weight, 1)))

    def _groups(self, matrix: Spectrum | Diagonal, why_not: str) -> Spectrum | Diagonal:
        if self.order is None:
            raise InputError(f"{why_not}; use transport='emd'")
        return matrix.permuted(self.order)

    def _carried(self, matrix: Spectrum, basis: Tensor) -> Spectrum:
        """The matrix with the mapped basis, which is orthonormal only if M is a permutation."""
        if self.order is not None:
            return replace(matrix, basis=basis)
        mixed = Spectrum.of_factor(basis.double(), matrix.values.double()).to(dtype=matrix.basis.dtype)
        return replace(mixed, unit=matrix.unit)


def carry(tensor: Tensor, place: Place, M: Tensor) -> Tensor:
    """Map the neurons of one place of a tensor by M."""
    blocks = tensor.unflatten(place.axis, (-1, place.block)).movedim(place.axis, 0)
    carried = torch.tensordot(M.to(tensor.dtype), blocks, 1).movedim(0, place.axis)
    flat: Tensor = carried.flatten(place.axis, place.axis + 1).contiguous()
    return flat


def load(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load a state_dict whose layers may have grown. Parameters and buffers take the sizes that come."""
    for name, tensor in state.items():
        owner, _, part = name.rpartition(".")
        module = model.get_submodule(owner)
        old = getattr(module, part)
        if old.shape != tensor.shape:
            new = torch.empty_like(tensor, device=old.device)
            setattr(module, part, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
            kind = kinds.find(module)
            if kind is not None and part == kind.weight:
                kind.resize(module, tensor.shape)
            for attribute, size in (("num_features", len(tensor)), ("normalized_shape", tuple(tensor.shape))):
                if hasattr(module, attribute):
                    setattr(module, attribute, size)
    model.load_state_dict(dict(state))
    return model


def check(spaces: Sequence[Space], weights: Mapping[str, Tensor]) -> None:
    """Raise InputError, which names the first place that does not fit, unless the spaces fit the weights."""
    seen: dict[tuple[str, int], str] = {}
    for space in spaces:
        for place in space.places:
            where = f"space {space.name!r}: axis {place.axis} of {place.tensor!r}"
            if place.tensor not in weights:
                raise InputError(f"{where} must be a weight of the network, got a name that it does not have")
            shape = tuple(weights[place.tensor].shape)
            if not 0 <= place.axis < len(shape) or shape[place.axis] != space.size * place.block:
                got = shape[place.axis] if 0 <= place.axis < len(shape) else "no such axis"
                raise InputError(f"{where} must be {space.size} neurons of {place.block} entries, got {got}")
            if (place.tensor, place.axis) in seen:
                raise InputError(f"{where} must belong to one space, got it in {seen[place.tensor, place.axis]!r} too")
            seen[place.tensor, place.axis] = space.name


def verify(model: nn.Module, spaces: Sequence[Space], inputs: Any, tolerance: float = 1e-3) -> None:
    """Raise InputError, which names the first space whose permutation changes the outputs, if there is one.

    The model is not changed.
    """
    for space, gap in _gaps(model, spaces, inputs):
        if not gap <= tolerance:
            raise InputError(
                f"space {space.name!r} must leave the outputs unchanged when its neurons are permuted, got a change of "
                f"{gap:.3g}; its places are {', '.join(p.tensor for p in space.places)}"
            )


def holding(model: nn.Module, spaces: Sequence[Space], inputs: Any) -> tuple[Spaces, dict[str, str]]:
    """The spaces whose permutation leaves the outputs as they were, and the reason for each that does not.

    The outputs may change by `TOLERANCE`, or by a few roundings if the network is less precise than float32.
    """
    found, reasons = [], {}
    rounding = max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)
    for space, gap in _gaps(model, spaces, inputs):
        if gap <= max(TOLERANCE, ROUNDINGS * rounding):
            found.append(space)
        else:
            reasons[space.name] = f"permuting its neurons changed the outputs by {gap:.2g} of their norm"
    return tuple(found), reasons


def _gaps(model: nn.Module, spaces: Sequence[Space], inputs: Any) -> Iterator[tuple[Space, float]]:
    """Every space, and by how much the outputs change when its neurons are permuted, relative to their norm."""
    state = model.state_dict()
    check(spaces, state)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad(), evaluating(model):
        before = _outputs(model, {}, inputs)
        for space in spaces:
            places = {place.tensor: state[place.tensor] for place in space.places}
            after = _outputs(model, permute(places, [space], {space.name: _cycle(space.size, rng)}), inputs)
            yield space, max((_gap(a, b) for a, b in zip(after, before, strict=True)), default=math.inf)


def _cycle(size: int, rng: torch.Generator) -> Tensor:
    """An order in which no neuron keeps its place."""
    order = torch.randperm(size, generator=rng)
    return torch.empty_like(order).index_copy_(0, order, order.roll(1))


def _gap(after: Tensor, before: Tensor) -> float:
    if after.shape != before.shape:
        return math.inf
    size = before.abs().max() if before.numel() else before.new_zeros(())
    if not size > 0:
        return 0.0 if bool((after == before).all()) else math.inf
    # Divided first, since squares of large outputs overflow and those of small ones vanish.
    return float(((after - before) / size).norm() / (before / size).norm())


@devices.full_precision()
def _outputs(model: nn.Module, weights: Mapping[str, Tensor], inputs: Any) -> list[Tensor]:
    """All tensors of numbers that the network gives out, with some of its weights replaced."""
    args, kwargs = arguments(inputs, devices.of(model))
    out = list(_tensors(torch.func.functional_call(model, dict(weights), tuple(args), kwargs)))
    if not (out and all(is_finite(tensor) for tensor in out)):
        raise InputError(
            f"{type(model).__name__} must give out finite numbers for its neuron spaces to be tried, got "
            f"{'NaN or infinity' if out else 'none'}"
        )
    return out


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() or output.is_complex():
            yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)
