"""Which axes of which parameters are the same neurons: the symmetry of an architecture, as data.

A space is a set of neurons and all the places where they occur. Permuting the neurons of one space in all its places
leaves the network's outputs as they were. tracing.py finds the spaces of a network; they can also be written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maecho.errors import UploadError
from maecho.network import kinds
from maecho.network.forward import evaluating


@dataclass(frozen=True)
class Place:
    """One axis of one tensor. Behind a flattened map a neuron has a block of neighbouring entries there."""

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
            if hasattr(module, "num_features"):
                setattr(module, "num_features", len(tensor))  # noqa: B010 (mypy sees a tensor or a module here)
    model.load_state_dict(dict(state))
    return model


def check(spaces: Sequence[Space], weights: Mapping[str, Tensor]) -> None:
    """Raise UploadError, which names the first place that does not fit, unless the spaces fit the weights."""
    seen: dict[tuple[str, int], str] = {}
    for space in spaces:
        for place in space.places:
            where = f"space {space.name!r}: axis {place.axis} of {place.tensor!r}"
            if place.tensor not in weights:
                raise UploadError(f"{where} must be a weight of the network, got a name that it does not have")
            shape = tuple(weights[place.tensor].shape)
            if not 0 <= place.axis < len(shape) or shape[place.axis] != space.size * place.block:
                got = shape[place.axis] if 0 <= place.axis < len(shape) else "no such axis"
                raise UploadError(f"{where} must be {space.size} neurons of {place.block} entries, got {got}")
            if (place.tensor, place.axis) in seen:
                raise UploadError(f"{where} must belong to one space, got it in {seen[place.tensor, place.axis]!r} too")
            seen[place.tensor, place.axis] = space.name


def verify(model: nn.Module, spaces: Sequence[Space], inputs: Any, tolerance: float = 1e-3) -> None:
    """Raise UploadError, which names the first space whose permutation changes the outputs, if there is one."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check(spaces, state)
    rng = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), evaluating(model):
            before = model(inputs)
            for space in spaces:
                order = torch.randperm(space.size, generator=rng)
                model.load_state_dict(permute(state, [space], {space.name: order}))
                gap = float((model(inputs) - before).norm() / before.norm().clamp(min=1e-12))
                if gap > tolerance:
                    raise UploadError(
                        f"space {space.name!r} must leave the outputs unchanged when its neurons are permuted, got a "
                        f"change of {gap:.3g}; its places are {', '.join(p.tensor for p in space.places)}"
                    )
    finally:
        model.load_state_dict(state)
