"""Count, mean and covariance of the raw inputs, class by class: what is said of them, and how it is cut down.

A Gaussian a class, or a few, is all that echo-chain needs of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.spectra import Spectrum

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NO_CLASS = -1
"""The one class of data without labels."""

Covariance = Literal["class", "shared"]
COVARIANCES = ("class", "shared")


@dataclass(frozen=True, eq=False)
class Moments:
    """What a client says about its raw inputs: a Gaussian for every class, or for every part of one."""

    classes: Int[Tensor, " k"]
    """The label of each; one that has several Gaussians comes several times."""
    counts: Int[Tensor, " k"]
    means: Float[Tensor, "k d"]
    covariances: tuple[Spectrum, ...]
    """One for each, or a single one that all share; a class of few examples has few directions."""
    shape: tuple[int, ...]
    """Of one input, before it was flattened to d."""
    residual: Float[Tensor, "g d"] | None = None
    """What directions that were cut off held of the variance of every coordinate, for each of the covariances."""
    in_cosines: bool = False
    """The coordinates: entries of an input, or of its cosine transform."""

    def __post_init__(self) -> None:
        for covariance in self.covariances:
            wrong = covariance.malformed()
            if wrong:
                raise ValueError(f"class covariances must be {wrong}")
            if covariance.basis is None or len(covariance.values) != 1:
                raise ValueError("class covariances must be one matrix each, given by directions, got another form")
        if self.means.dim() != 2 or self.classes.dim() != 1 or self.counts.dim() != 1:
            raise ValueError(f"class means must be [classes, inputs], got shape {tuple(self.means.shape)}")
        k, d = self.means.shape
        if not (len(self.classes) == len(self.counts) == k and len(self.covariances) in (1, k)):
            raise ValueError(f"moments must speak of the same classes throughout, got means of {k}")
        if {c.width for c in self.covariances} != {d} or d != int(torch.tensor(self.shape).prod()):
            raise ValueError(f"moments must be of inputs of shape {self.shape}, got means of length {d}")
        if self.residual is not None and self.residual.shape != (len(self.covariances), d):
            raise ValueError(f"what is left of the variances must be one a mean's entry, got {self.residual.shape}")

    def cut(self, rank: Callable[[Spectrum], int]) -> Moments:
        """The leading directions of each covariance alone; of the others no more than the variance of each coordinate:
        those, of entries and cosines, in which what is lost is nearer to a diagonal matrix."""
        kept = tuple(covariance.cut(rank(covariance)) for covariance in self.covariances)
        if all(after.rank == before.rank for before, after in zip(self.covariances, kept, strict=True)):
            return self
        in_cosines = self.in_cosines
        lost = self._lost(kept, in_cosines)
        if len(self.shape) > 1 and self.residual is None:
            lost, in_cosines = nearer_to_diagonal(lost, self._lost(kept, in_cosines=True))
        residual = lost.to(self.means) if self.residual is None else self.residual + lost.to(self.means)
        return replace(self, covariances=kept, residual=residual, in_cosines=in_cosines)

    def _lost(self, kept: Sequence[Spectrum], in_cosines: bool) -> Float[Tensor, "g d"]:
        """Variance of every coordinate along the directions that are not kept."""
        found = []
        for whole, part in zip(self.covariances, kept, strict=True):
            assert whole.basis is not None
            rows = whole.basis[0, :, part.rank :].to(whole.values).mT
            rows = cosines.forth(rows, self.shape) if in_cosines else rows
            found.append(whole.values[0, part.rank :] @ rows**2)
        return torch.stack(found)

    @property
    def variances(self) -> Float[Tensor, "g d"]:
        """Of every entry of an input, in float64."""
        held = torch.stack([_diagonal(covariance) for covariance in self.covariances])
        if self.residual is None:
            return held
        rest = self.residual.double()
        return held + (cosines.variances(rest, self.shape) if self.in_cosines else rest)

    @property
    def bytes(self) -> int:
        plain = [self.classes, self.counts, self.means, *([] if self.residual is None else [self.residual])]
        return sum(t.nbytes for t in plain) + sum(8 + covariance.bytes for covariance in self.covariances)


def nearer_to_diagonal(entries: Tensor, cosines_: Tensor) -> tuple[Tensor, bool]:
    """Variances of what is lost, in the coordinates that suit it, and whether these are cosines. The matrices being the
    same, squares on the diagonals are what those off them lack."""
    in_cosines = bool(cosines_.square().sum() > entries.square().sum())
    return (cosines_ if in_cosines else entries), in_cosines


def _diagonal(A: Spectrum) -> Float[Tensor, " d"]:
    assert A.basis is not None
    diagonal: Tensor = A.basis[0].double() ** 2 @ A.values[0].double()
    return diagonal
