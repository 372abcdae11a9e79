"""How tensors of a model's state_dict are made of the weights that are merged.

An attention keeps the matrices of queries, keys and values in one tensor, and a module with weight norm keeps lengths
and directions instead of its weight. Merged are the matrices themselves, under the names of a twin (see twin.py). Then
`pack` makes the tensors that the model loads. How is plain data, which travels with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Form = Literal["rows", "norm", "direction", "left", "right"]
POWER_STEPS = 30
"""How often `left` and `right` multiply by W. They need not have converged for W to come back exactly."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a state_dict, as a function of weights: their rows, one weight after the other, are W.

    The form says which function of W it is:

        rows        W itself
        norm        the norms of W along all axes but `axis`; along all axes if that is -1 (weight norm's g)
        direction   W, which weight norm divides by these norms; 1 where a norm is 0 (weight norm's v)
        left        u with uᵀ W v = 1 (spectral norm divides W by uᵀ W v)
        right       v
    """

    name: str
    parts: tuple[str, ...]
    form: Form = "rows"
    axis: int = 0

    def of(self, weights: Mapping[str, Tensor]) -> Tensor:
        parts = [weights[part] for part in self.parts]
        W = parts[0] if len(parts) == 1 else torch.cat(parts)
        return W if self.form == "rows" else _FORMS[self.form](W, self.axis).to(W.dtype).contiguous()


def _norm(W: Tensor, axis: int) -> Tensor:
    norm: Tensor = torch.norm_except_dim(W, 2, axis)
    return norm


def _direction(W: Tensor, axis: int) -> Tensor:
    return torch.where(_norm(W, axis) > 0, W, torch.ones_like(W))


def _left(W: Tensor, axis: int) -> Tensor:
    return _singular(W, axis)[0]


def _right(W: Tensor, axis: int) -> Tensor:
    return _singular(W, axis)[1]


def _singular(W: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """u and v close to the leading singular vectors of W, with u so long that uᵀ W v = 1."""
    matrix = W.detach().double().movedim(axis, 0).flatten(1)
    v = torch.ones_like(matrix[0])
    v[0] += 1  # so that a matrix whose rows have the mean 0 does not end it at once
    u = torch.zeros_like(matrix[:, 0])
    for _ in range(POWER_STEPS):
        v = torch.nn.functional.normalize(v, dim=0)
        u = torch.nn.functional.normalize(matrix @ v, dim=0)
        v = matrix.T @ u
    v = torch.nn.functional.normalize(v, dim=0)
    sigma = u @ matrix @ v
    return u / sigma.where(sigma > 0, torch.ones_like(sigma)), v


_FORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "norm": _norm,
    "direction": _direction,
    "left": _left,
    "right": _right,
}


def pack(weights: Mapping[str, Tensor], stored: Sequence[Stored]) -> dict[str, Tensor]:
    """The model's state_dict, from the weights that are merged. Tied names must stand among them."""
    inside = {part for one in stored for part in one.parts}
    out = {name: tensor for name, tensor in weights.items() if name not in inside}
    return out | {one.name: one.of(weights) for one in stored}


def tied(weights: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights, with tied tensors under all their names."""
    return {**weights, **{name: weights[kept] for name, kept in aliases.items()}}


def model_state(
    weights: Mapping[str, Tensor], aliases: Mapping[str, str], stored: Sequence[Stored]
) -> dict[str, Tensor]:
    """The model's state_dict, from the weights that are merged."""
    return pack(tied(weights, aliases), stored)


def packed_names(names: Iterable[str], weights: Iterable[str], stored: Sequence[Stored]) -> list[str]:
    """For a set of weights the names in the model's state_dict: of tensors that are made of these weights alone."""
    chosen = set(names)
    inside = {part for one in stored for part in one.parts}
    plain = [name for name in weights if name in chosen and name not in inside]
    return plain + [one.name for one in stored if chosen.issuperset(one.parts)]


def complaint(stored: Iterable[Stored], weights: Mapping[str, Tensor], aliases: Mapping[str, str]) -> str | None:
    """A sentence that says why these tensors cannot be made of the weights. None if they can. Values are not read, so
    the weights may be tensors on the device "meta"."""
    named: set[str] = set()
    used: set[tuple[str, str]] = set()
    for one in stored:
        if one.name in named or one.name in weights or one.name in aliases:
            return f"{one.name!r} must be a weight or made of weights, once, got it twice"
        named.add(one.name)
        if not one.parts:
            return f"{one.name!r} must be made of at least one weight, got none"
        shapes = []
        form = "rows" if one.form == "direction" else one.form
        for part in one.parts:
            if part not in weights and part not in aliases:
                return f"{one.name!r} must be made of weights, got {part!r}, which is not there"
            if (part, form) in used:
                return f"{part!r} must lie in one place of one tensor, got it in {one.name!r} too"
            used.add((part, form))
            tensor = weights[aliases.get(part, part)]
            if not tensor.is_floating_point() or not tensor.dim():
                return f"{one.name!r} must be made of rows of floating point, got {part!r}, which has none"
            shapes.append(tuple(tensor.shape[1:]))
        if len(set(shapes)) > 1:
            return f"the parts of {one.name!r} must have rows of one shape, got {', '.join(map(str, shapes))}"
        least = 2 if one.form in ("left", "right") else 1
        axes = 1 + len(shapes[0])
        if axes < least or not -1 <= one.axis < axes:
            return f"{one.name!r} must be computed along an axis of its {axes}, got {one.axis}"
    return None
