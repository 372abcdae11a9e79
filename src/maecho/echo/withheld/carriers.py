"""Counts how many examples stand behind every number that a relay client would send.

A server chooses the merged weights. It may choose them so that a neuron fires for one record alone: then Σ h hᵀ and
Σ z hᵀ have a row that is this record's. With a minimum of m an input of a unit is withheld if one example makes more
than 1/m of its second moment Σ h². So at least m examples carry each that is sent, however little the others add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

ROUNDING = 1e-9
"""What counts as round-off in a share."""


@dataclass(frozen=True)
class Kept:
    """What of one unit's sums may be sent."""

    inputs: Bool[Tensor, "g d"]
    by_class: Bool[Tensor, "k d"] | None
    """Of the sums by class, if there are any."""


class Carriers:
    """Adds up, for every input of every unit, its second moment and the largest part of it that one example makes."""

    def __init__(self, minimum: int):
        self.minimum = minimum
        self._moments: dict[str, Tensor] = {}
        self._largest: dict[str, dict[int, Tensor]] = {}
        self._of_classes: dict[str, Tensor] = {}
        self._largest_of_classes: dict[str, dict[int, Tensor]] = {}

    def see(self, unit: str, h: Tensor, examples: int, width: int, y: Float[Tensor, "n k"] | None, call: int) -> None:
        """Look at rows that are about to be added up.

        Args:
            unit: the name of the unit.
            h: its rows [g, n, d], example after example; or tokens [n].
            examples: how many examples they are of. Rows that cannot be told apart count as those of one example.
            width: d, for tokens.
            y: the labels as unit rows, if there are sums by class.
            call: which run of the unit in a pass it is. An example may give it rows every time, so its parts are added.
        """
        if h.shape[-2 if h.dim() == 3 else 0] % examples:
            examples = 1
        if h.dim() == 1:
            tokens = h.reshape(examples, -1)
            parts = torch.zeros(1, examples, width, dtype=torch.float64, device=h.device)
            parts[0].scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.float64))
        else:
            parts = h.unflatten(1, (examples, -1)).square().sum(2)
        _add(self._moments, unit, parts.sum(1))
        _raise(self._largest.setdefault(unit, {}), call, parts.amax(1))
        if y is not None:
            _add(self._of_classes, unit, y.T @ parts[0])
            largest = torch.zeros(y.shape[1], parts.shape[-1], dtype=torch.float64, device=h.device)
            labels = y.argmax(1, keepdim=True).expand_as(parts[0])
            largest = largest.scatter_reduce(0, labels, parts[0], "amax")
            _raise(self._largest_of_classes.setdefault(unit, {}), call, largest)

    def kept(self, unit: str) -> Kept:
        """What of a unit's sums is carried by enough examples."""
        of_classes = self._of_classes.get(unit)
        return Kept(
            self._carried(self._moments[unit], self._largest[unit]),
            None if of_classes is None else self._carried(of_classes, self._largest_of_classes[unit]),
        )

    def _carried(self, moments: Tensor, largest: Mapping[int, Tensor]) -> Tensor:
        # No example makes more than the largest part of each run together.
        return self.minimum * torch.stack([*largest.values()]).sum(0) <= (1 + ROUNDING) * moments


def _add(into: dict[str, Tensor], unit: str, found: Tensor) -> None:
    into[unit] = into[unit] + found if unit in into else found


def _raise(into: dict[int, Tensor], call: int, found: Tensor) -> None:
    into[call] = torch.maximum(into[call], found) if call in into else found
