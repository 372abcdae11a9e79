"""The sums of one unit: what a client sends about it, and what the fit reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.echo import wire
from maecho.errors import InputError
from maecho.network.units import Unit

if TYPE_CHECKING:
    from jaxtyping import Float

REQUIRED = ("gram", "cross", "prior")
"""The sums without which nothing can be fitted."""


@dataclass(frozen=True, eq=False)
class UnitTotals:
    """Sums of one unit over a client's examples, or over those of many clients. All are float64.

    h is an input of the unit in the merged network, z is what the client's own unit gives out for the same sample, and
    y is the sample's label as a unit row.
    """

    unit: str
    gram: Float[Tensor, "g t"]
    """Σ h hᵀ: the upper triangle in one row [g, d (d + 1) / 2]. For one-hot rows: the counts [g, 1, d]."""
    cross: Float[Tensor, "g o d"]
    """Σ z hᵀ."""
    prior: Float[Tensor, "g o d"]
    """The client's own matrix times the number of its examples."""
    labels: Float[Tensor, "k d"] | None = None
    """Σ y hᵀ. None unless all examples have labels."""
    outputs: Float[Tensor, "k o"] | None = None
    """Σ y zᵀ, under the same condition."""
    counts: Float[Tensor, " k"] | None = None
    """The number of examples of each class, under the same condition."""
    noise: Float[Tensor, ""] | None = None
    """With privacy: the variance of the noise on an entry of the gram."""

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str):
            raise InputError(f"the unit of totals must be a name, got {type(self.unit).__name__}")
        for part, tensor in self.parts().items():
            object.__setattr__(self, part, real_numbers(f"{part} of {self.unit!r}", tensor))
        shape = tuple(self.prior.shape)
        if len(shape) != 3:
            raise InputError(f"the sums of {self.unit!r} must be of groups, outputs and inputs, got {shape}")
        g, o, d = shape
        if self.cross.shape != shape:
            raise InputError(f"the sums of {self.unit!r} must be {shape} as its weights, got {_shape(self.cross)}")
        triangle, diagonal = (g, d * (d + 1) // 2), (g, 1, d)
        if self.gram.shape not in (triangle, diagonal):
            raise InputError(
                f"Σ h hᵀ of {self.unit!r} must be {triangle} or {diagonal} numbers, got {_shape(self.gram)}"
            )
        classes = len(self.counts) if self.counts is not None and self.counts.dim() else 0
        for part, expected in {"labels": (classes, d), "outputs": (classes, o), "counts": (classes,)}.items():
            tensor = getattr(self, part)
            if tensor is not None and tensor.shape != expected:
                raise InputError(f"{part} of {self.unit!r} must be {expected}, got {_shape(tensor)}")
        if (self.labels is None) != (self.counts is None) or (self.outputs is not None and self.labels is None):
            there = ", ".join(part for part in ("labels", "outputs", "counts") if part in self.parts())
            raise InputError(f"sums by class of {self.unit!r} must come with their counts, got {there} alone")
        if self.noise is not None and self.noise.numel() != 1:
            raise InputError(f"noise of {self.unit!r} must be one number, got {_shape(self.noise)}")

    def parts(self) -> dict[str, Tensor]:
        """All sums that are not None, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "unit"}
        return {part: tensor for part, tensor in found.items() if tensor is not None or part in REQUIRED}


def sums_of(unit: Unit, shape: tuple[int, ...], totals: UnitTotals, device: torch.device) -> dict[str, Tensor]:
    """Check one unit's totals against the shape [g, o, d] of its matrix, and bring them into the form that the fit
    reads: the gram is a whole matrix, unless it is diagonal."""
    g, _, d = shape
    if totals.prior.shape != shape:
        raise InputError(f"the sums of {unit.name!r} must be {shape} as its weights, got {_shape(totals.prior)}")
    expected = (g, 1, d) if unit.layer.one_hot else (g, d * (d + 1) // 2)
    if totals.gram.shape != expected:
        raise InputError(f"Σ h hᵀ of {unit.name!r} must be {expected} numbers, got {_shape(totals.gram)}")
    found = {part: tensor.to(device) for part, tensor in totals.parts().items()}
    return found if unit.layer.one_hot else found | {"gram": wire.whole_matrix(found["gram"], d)}


def real_numbers(what: str, tensor: Tensor) -> Tensor:
    """The tensor in float64. Raises InputError unless it holds finite real numbers."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise InputError(f"{what} must be real numbers, got {tensor.dtype}")
    if not tensor.isfinite().all():
        raise InputError(f"{what} must be finite, got NaN or infinity")
    return tensor.double()


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
