"""Gaussians that describe examples: count, mean and covariance, class by class.

echo-chain draws inputs from them. It needs nothing else from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from maecho.linalg import cosines
from maecho.linalg.spectra import Spectrum

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NO_CLASS = -1
"""The class of all examples in data without labels."""

Covariance = Literal["class", "shared"]
COVARIANCES = ("class", "shared")

RESIDUAL = {False: "residual", True: "residual_of_cosines"}
"""The name of the residual in files: whether its coordinates are cosines -> name."""


@dataclass(frozen=True, eq=False)
class Gaussians:
    """A Gaussian for every class, or for every part of one."""

    classes: Int[Tensor, " k"]
    """The label of each Gaussian. A class with several Gaussians stands here several times."""
    counts: Int[Tensor, " k"]
    means: Float[Tensor, "k d"]
    covariances: tuple[Spectrum, ...]
    """One for each Gaussian, or a single one that all share. A class of few examples has few directions."""
    shape: tuple[int, ...]
    """The shape of one input, before it was flattened to d."""
    residual: Float[Tensor, "g d"] | None = None
    """For each covariance, the variance of every coordinate along the directions that were cut off."""
    in_cosines: bool = False
    """Whether the coordinates of `residual` are those of the input's cosine transform. If not, they are its entries."""

    def __post_init__(self) -> None:
        for covariance in self.covariances:
            wrong = covariance.malformed()
            if wrong:
                raise ValueError(f"class covariances must be {wrong}")
            if not isinstance(covariance, Spectrum) or len(covariance.values) != 1 or covariance.rest is not None:
                raise ValueError("class covariances must be one matrix each, given by directions, got another form")
        if self.means.dim() != 2 or self.classes.dim() != 1 or self.counts.dim() != 1:
            raise ValueError(f"class means must be [classes, inputs], got shape {tuple(self.means.shape)}")
        k, d = self.means.shape
        if not (len(self.classes) == len(self.counts) == k and len(self.covariances) in (1, k)):
            raise ValueError(
                f"moments must have one class, count and mean for each Gaussian, and one covariance for each or one "
                f"for all, got {len(self.classes)}, {len(self.counts)}, {k} and {len(self.covariances)}"
            )
        if {c.width for c in self.covariances} != {d} or d != math.prod(self.shape):
            raise ValueError(f"moments must be of inputs of shape {self.shape}, got means of length {d}")
        if self.residual is not None and self.residual.shape != (len(self.covariances), d):
            expected = (len(self.covariances), d)
            raise ValueError(f"the residual variances must have shape {expected}, got {tuple(self.residual.shape)}")

    @property
    def variances(self) -> Float[Tensor, "g d"]:
        """The variance of every entry of an input, in float64."""
        held = torch.stack([c.basis[0].double() ** 2 @ c.values[0].double() for c in self.covariances])
        if self.residual is None:
            return held
        rest = self.residual.double()
        return held + (cosines.variances(rest, self.shape) if self.in_cosines else rest)

    @property
    def bytes(self) -> int:
        plain = [self.classes, self.counts, self.means, *([] if self.residual is None else [self.residual])]
        return sum(t.nbytes for t in plain) + sum(8 + covariance.bytes for covariance in self.covariances)

    @property
    def residual_bytes(self) -> int:
        """The size that a residual would add; 0 if there is one already."""
        return 0 if self.residual is not None else len(self.covariances) * self.means[0].nbytes

    def cut(self, rank: Callable[[Spectrum], int], keep_variances: bool = True) -> Gaussians:
        """Keep the leading directions of each covariance.

        With `keep_variances` the variance of every coordinate along the other directions is added to the residual.
        Otherwise there is no residual, not even one that was there.
        Its coordinates are entries or cosines: the choice falls on those in which the lost part is nearer to a
        diagonal matrix.
        """
        kept = tuple(covariance.cut(rank(covariance)) for covariance in self.covariances)
        whole = all(after.rank == before.rank for before, after in zip(self.covariances, kept, strict=True))
        if whole and (keep_variances or self.residual is None):
            return self
        if not keep_variances:
            return replace(self, covariances=kept, residual=None, in_cosines=False)
        in_cosines = self.in_cosines
        lost = self._lost(kept, in_cosines)
        if len(self.shape) > 1 and self.residual is None:
            lost, in_cosines = nearer_to_diagonal(lost, self._lost(kept, in_cosines=True))
        residual = lost.to(self.means) if self.residual is None else self.residual + lost.to(self.means)
        return replace(self, covariances=kept, residual=residual, in_cosines=in_cosines)

    def _lost(self, kept: Sequence[Spectrum], in_cosines: bool) -> Float[Tensor, "g d"]:
        """The variance of every coordinate along the directions that are not kept."""
        found = []
        for whole, part in zip(self.covariances, kept, strict=True):
            rows = whole.basis[0, :, part.rank :].to(whole.values).mT
            rows = cosines.forth(rows, self.shape) if in_cosines else rows
            found.append(whole.values[0, part.rank :] @ rows**2)
        return torch.stack(found)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Gaussians:
        """Means, covariances and residual in another dtype; everything on another device."""
        return replace(
            self,
            classes=self.classes.to(device=device),
            counts=self.counts.to(device=device),
            means=self.means.to(dtype=dtype, device=device),
            covariances=tuple(covariance.to(dtype=dtype, device=device) for covariance in self.covariances),
            residual=None if self.residual is None else self.residual.to(dtype=dtype, device=device),
        )

    def plus(self, other: Gaussians) -> Gaussians:
        """The moments of both clients' examples together, if each class has one Gaussian with an uncut covariance."""
        mine, theirs = self._by_class(), other._by_class()
        found = {label: _pooled([m[label] for m in (mine, theirs) if label in m]) for label in {**mine, **theirs}}
        labels = sorted(found)
        return Gaussians(
            classes=torch.tensor(labels),
            counts=torch.tensor([found[label][0] for label in labels]),
            means=torch.stack([found[label][1] for label in labels]).to(self.means),
            covariances=tuple(Spectrum.of_dense(found[label][2].unsqueeze(0)) for label in labels),
            shape=self.shape,
        )

    def _by_class(self) -> dict[int, tuple[int, Tensor, Tensor]]:
        labels: list[int] = self.classes.tolist()
        if len(set(labels)) < len(labels) or len(self.covariances) < len(labels) or self.residual is not None:
            kind = "a residual" if self.residual is not None else f"{len(self.covariances)} covariances"
            raise ValueError(
                "moments can be added if each class has one Gaussian with an uncut covariance of its own, got "
                f"{len(labels)} Gaussians of {len(set(labels))} classes with {kind}"
            )
        parts = zip(labels, self.counts.tolist(), self.means.double(), self.covariances, strict=True)
        return {label: (n, mean, covariance.dense()[0].double()) for label, n, mean, covariance in parts}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names in files. The directions of all covariances follow each other in one matrix;
        `ranks` says how many each covariance has."""
        ranks = torch.tensor([covariance.rank for covariance in self.covariances], device=self.counts.device)
        found = {
            "classes": self.classes,
            "counts": self.counts,
            "means": self.means,
            "covariances/ranks": ranks,
            "covariances/values": torch.cat([covariance.values[0] for covariance in self.covariances]),
            "covariances/basis": torch.cat([covariance.basis[0] for covariance in self.covariances], 1),
        }
        return found if self.residual is None else {**found, RESIDUAL[self.in_cosines]: self.residual}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        """The inverse of `tensors`. Raises ValueError or KeyError where the parts do not fit together."""
        counts, values, basis = (tensors[f"covariances/{part}"] for part in ("ranks", "values", "basis"))
        if (counts.dim(), values.dim(), basis.dim()) != (1, 1, 2) or counts.dtype != torch.int64:
            got = f"{list(counts.shape)}, {list(values.shape)} and {list(basis.shape)}"
            raise ValueError(f"covariances must be one row of ranks, one of values and a matrix, got {got}")
        ranks: list[int] = counts.tolist()
        if min(ranks, default=0) < 0 or not sum(ranks) == len(values) == basis.shape[1]:
            raise ValueError(
                f"the ranks of covariances must sum to their eigenvalues and vectors, got ranks {sum(ranks)}, "
                f"{len(values)} eigenvalues and vectors {list(basis.shape)}"
            )
        pairs = zip(values.split(ranks), basis.split(ranks, 1), strict=True)
        return cls(
            classes=tensors["classes"],
            counts=tensors["counts"],
            means=tensors["means"],
            covariances=tuple(Spectrum(s.unsqueeze(0), U.unsqueeze(0).contiguous()) for s, U in pairs),
            residual=next((tensors[name] for name in RESIDUAL.values() if name in tensors), None),
            in_cosines=RESIDUAL[True] in tensors,
            shape=tuple(facts.get("shape", tensors["means"].shape[1:])),
        )


def _pooled(parts: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[int, Tensor, Tensor]:
    """Count, mean and covariance of one class, from those of several clients."""
    n = sum(count for count, _, _ in parts)
    mean = sum((count * m for count, m, _ in parts), torch.zeros_like(parts[0][1])) / n
    second = sum((count * (C + torch.outer(m, m)) for count, m, C in parts), torch.zeros_like(parts[0][2])) / n
    return n, mean, second - torch.outer(mean, mean)


def nearer_to_diagonal(entries: Tensor, of_cosines: Tensor) -> tuple[Tensor, bool]:
    """The variances in the better of two coordinate systems, and whether that one is the cosines.

    The Frobenius norm is the same in both systems. So a larger diagonal means a smaller rest.
    """
    in_cosines = bool(of_cosines.square().sum() > entries.square().sum())
    return (of_cosines if in_cosines else entries), in_cosines
