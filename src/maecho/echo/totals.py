"""The sums of one unit, in two forms.

`UnitSums` is the form to compute with: a client adds it up, and the server fits the unit to it. `UnitTotals` is the
form that travels: it is checked, and it holds only the upper triangle of Σ h hᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.echo import wire
from maecho.errors import InputError
from maecho.linalg.finite import is_finite
from maecho.network.units import Unit

if TYPE_CHECKING:
    from jaxtyping import Float

REQUIRED = ("gram", "cross", "prior")
"""The sums without which nothing can be fitted."""


@dataclass(frozen=True, eq=False)
class ByClass:
    """The sums by class of one unit. y is a sample's label as a unit row."""

    labels: Float[Tensor, "k d"]
    """Σ y hᵀ."""
    counts: Float[Tensor, " k"]
    """The number of examples of each class."""
    outputs: Float[Tensor, "k o"] | None = None
    """Σ y zᵀ. Only layers before the head need it."""
    squares: Float[Tensor, " 2"] | None = None
    """Σ ‖z‖², and Σ ‖z − z̄‖² with z̄ the mean over the outputs."""

    def add_(self, other: ByClass) -> ByClass:
        """Add in place."""
        outputs = squares = None
        if self.outputs is not None and other.outputs is not None:
            outputs = self.outputs.add_(other.outputs)
        if self.squares is not None and other.squares is not None:
            squares = self.squares.add_(other.squares)
        return ByClass(self.labels.add_(other.labels), self.counts.add_(other.counts), outputs, squares)


@dataclass(frozen=True, eq=False)
class UnitSums:
    """The sums of one unit to compute with, in float64. h, z and y are as in `UnitTotals`."""

    gram: Float[Tensor, "g d d"]
    """Σ h hᵀ. For one-hot rows it is the counts [g, 1, d]."""
    cross: Float[Tensor, "g o d"]
    """Σ z hᵀ."""
    by_class: ByClass | None = None
    """The sums by class, if all examples have labels."""
    noise: Float[Tensor, ""] | None = None
    """With privacy: the variance of the noise on an entry of the gram."""
    floor: Float[Tensor, ""] | float = 0.0
    """The ridge is at least this large, since the gram had noise."""
    disagreement: float = 1.0
    """Σ ‖z − W̄h‖² / Σ ‖z‖², W̄ the average of the clients' own matrices: 0 for clients with one model, and at most 1.
    It is 1 if it is not known."""

    def add_(self, other: UnitSums) -> UnitSums:
        """Add sums without noise in place."""
        found = [one for one in (self.by_class, other.by_class) if one is not None]
        by_class = found[0].add_(found[1]) if len(found) == 2 else next(iter(found), None)
        return UnitSums(self.gram.add_(other.gram), self.cross.add_(other.cross), by_class)


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
    squares: Float[Tensor, " 2"] | None = None
    """Σ ‖z‖² and Σ ‖z − z̄‖² with z̄ the mean over the outputs, under the same condition. Older answers do not
    have it."""
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
        for part, expected in {
            "labels": (classes, d),
            "outputs": (classes, o),
            "counts": (classes,),
            "squares": (2,),
        }.items():
            tensor = getattr(self, part)
            if tensor is not None and tensor.shape != expected:
                raise InputError(f"{part} of {self.unit!r} must be {expected}, got {_shape(tensor)}")
        if (self.labels is None) != (self.counts is None) or (
            self.labels is None and (self.outputs is not None or self.squares is not None)
        ):
            there = ", ".join(part for part in ("labels", "outputs", "counts", "squares") if part in self.parts())
            raise InputError(f"sums by class of {self.unit!r} must come with their counts, got {there} alone")
        if self.noise is not None and self.noise.numel() != 1:
            raise InputError(f"noise of {self.unit!r} must be one number, got {_shape(self.noise)}")

    def parts(self) -> dict[str, Tensor]:
        """All sums that are not None, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "unit"}
        return {part: tensor for part, tensor in found.items() if tensor is not None or part in REQUIRED}


def totals_of(unit: Unit, sums: UnitSums, prior: Float[Tensor, "g o d"]) -> UnitTotals:
    """The form of one unit's sums that travels, in memory of its own on the CPU."""
    own, by_class = wire.own_memory, sums.by_class
    return UnitTotals(
        unit.name,
        gram=own(sums.gram if unit.layer.one_hot else wire.upper_triangle(sums.gram)),
        cross=own(sums.cross),
        prior=own(prior),
        labels=None if by_class is None else own(by_class.labels),
        outputs=None if by_class is None or by_class.outputs is None else own(by_class.outputs),
        counts=None if by_class is None else own(by_class.counts),
        squares=None if by_class is None or by_class.squares is None else own(by_class.squares),
        noise=None if sums.noise is None else own(sums.noise),
    )


def sums_of(unit: Unit, shape: tuple[int, ...], totals: UnitTotals, device: torch.device) -> UnitSums:
    """The inverse of `totals_of`, without the prior. Raises InputError unless the totals fit the shape [g, o, d] of the
    unit's matrix."""
    g, _, d = shape
    if totals.prior.shape != shape:
        raise InputError(f"the sums of {unit.name!r} must be {shape} as its weights, got {_shape(totals.prior)}")
    expected = (g, 1, d) if unit.layer.one_hot else (g, d * (d + 1) // 2)
    if totals.gram.shape != expected:
        raise InputError(f"Σ h hᵀ of {unit.name!r} must be {expected} numbers, got {_shape(totals.gram)}")
    gram, by_class = totals.gram.to(device), None
    if totals.labels is not None and totals.counts is not None:
        outputs = None if totals.outputs is None else totals.outputs.to(device)
        squares = None if totals.squares is None else totals.squares.to(device)
        by_class = ByClass(totals.labels.to(device), totals.counts.to(device), outputs, squares)
    noise = None if totals.noise is None else totals.noise.to(device)
    whole = gram if unit.layer.one_hot else wire.whole_matrix(gram, d)
    return UnitSums(whole, totals.cross.to(device), by_class, noise)


def real_numbers(what: str, tensor: Tensor) -> Tensor:
    """The tensor in float64. Raises InputError unless it holds finite real numbers."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise InputError(f"{what} must be real numbers, got {tensor.dtype}")
    if not is_finite(tensor):
        raise InputError(f"{what} must be finite, got NaN or infinity")
    return tensor.double()


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
