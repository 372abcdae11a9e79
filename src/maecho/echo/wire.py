"""The wire form of messages: one flat dictionary of tensors, which any network can carry.

Every key of the wire stands in this file:

    question   round · open · unit/<layer> · join/<layer>/<BatchNorm> · head/<layer> · weights/<parameter>
    answer     clients · examples · sum/<layer>/<part>, the parts being the fields of UnitTotals
    opening    what the first answer says besides:
               stage/<layer> · join/<layer>/<BatchNorm> · head/<layer> · plain/<parameter>

If the key alone carries the information, its tensor is a single 1. Of a symmetric matrix only the upper triangle
travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.errors import InputError
from maecho.formatting import numbers

if TYPE_CHECKING:
    from jaxtyping import Float

ROUND, OPEN, CLIENTS, EXAMPLES = "round", "open", "clients", "examples"
UNIT, JOIN, HEAD, WEIGHTS, SUM, STAGE, PLAIN = "unit/", "join/", "head/", "weights/", "sum/", "stage/", "plain/"


def mark() -> Tensor:
    """The tensor for a key that alone carries the information. Each call makes a new one."""
    return torch.ones((), dtype=torch.int64)


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries whose keys begin with the prefix, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def joins(tensors: Mapping[str, Tensor], layers: Iterable[str]) -> dict[str, str]:
    """For these layers: layer -> the BatchNorm that is joined to it."""
    pairs = below(JOIN, tensors)
    return {layer: pair.removeprefix(f"{layer}/") for layer in layers for pair in pairs if pair.startswith(f"{layer}/")}


def head(tensors: Mapping[str, Tensor]) -> str | None:
    """The last layer, if the message names one."""
    names = list(below(HEAD, tensors))
    if len(names) > 1:
        raise InputError(f"a message must name one last layer, got {', '.join(map(repr, names))}")
    return names[0] if names else None


def check_tensors(message: object, what: str) -> None:
    """Raise InputError unless a message from outside is a dictionary of tensors."""
    if not isinstance(message, Mapping):
        raise InputError(f"{what} must be a dictionary of tensors, got {type(message).__name__}")
    for key, tensor in message.items():
        if not isinstance(key, str):
            raise InputError(f"{what} must have strings as keys, got {type(key).__name__}")
        if not isinstance(tensor, Tensor):
            raise InputError(f"{key!r} must be a tensor, got {type(tensor).__name__}")


def check_keys(message: Mapping[str, Tensor], understood: Mapping[str, Tensor], what: str) -> None:
    """Raise InputError unless every key of a message was understood."""
    unknown = sorted(message.keys() - understood.keys())
    if unknown:
        raise InputError(f"{what} must hold keys that mean something there, got {unknown[0]!r}")


def whole_number(key: str, tensor: Tensor) -> int:
    """The whole number that stands under a key."""
    if tensor.numel() != 1 or tensor.is_floating_point() or tensor.is_complex() or int(tensor) < 0:
        raise InputError(f"{key!r} must be one whole number, at least 0, got {numbers(tensor)}")
    return int(tensor)


def add(total: Mapping[str, Tensor], answer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum of two answers, key by key, as secure aggregation adds, too.

    Real numbers are added. Whole numbers must be equal, but of two counters under `plain/` the larger one is taken.
    """
    if answer.keys() != total.keys():
        odd = sorted(answer.keys() ^ total.keys())[0]
        raise InputError(
            f"must hold what the first one holds, got {odd!r} in one of them alone; all clients must run one network, "
            "and all have labels or none"
        )
    out = {}
    for key, tensor in answer.items():
        before = total[key]
        if tensor.shape != before.shape:
            raise InputError(f"{key!r} must be {tuple(before.shape)}, got {tuple(tensor.shape)}")
        if tensor.is_floating_point() != before.is_floating_point():
            raise InputError(f"{key!r} must be {before.dtype} as for the others, got {tensor.dtype}")
        if tensor.is_floating_point():
            out[key] = before + tensor.to(before)
        elif key.startswith(PLAIN):
            out[key] = before.maximum(tensor.to(before))
        else:
            if not torch.equal(before, tensor.to(before)):
                raise InputError(f"{key!r} must be {numbers(before)} as for the others, got {numbers(tensor)}")
            out[key] = tensor
    return out


def own_memory(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU. Later changes to the tensor do not change the message."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def upper_triangle(A: Float[Tensor, "g d d"]) -> Float[Tensor, "g t"]:
    """A symmetric matrix as one row of numbers [g, d (d + 1) / 2]."""
    d = A.shape[-1]
    rows, columns = torch.triu_indices(d, d, device=A.device)
    return A[..., rows, columns]


def whole_matrix(A: Float[Tensor, "g t"], d: int) -> Float[Tensor, "g d d"]:
    """The inverse of `upper_triangle`, for d inputs."""
    rows, columns = torch.triu_indices(d, d, device=A.device)
    full = A.new_empty(len(A), d, d)
    full[:, rows, columns] = A
    full[:, columns, rows] = A
    return full
