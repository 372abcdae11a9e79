"""The parts of the values of statistics: how they are written, read, cut and moved, whatever statistic they belong to.

A value is one part, or a mapping of names (layers, weights) to parts. All parts of a statistic are of one `Kind`. Three
kinds stand here: tensors, symmetric matrices (`Spectrum` or `Diagonal`) and `Gaussians`. A statistic whose parts are
something else brings a kind of its own, in its own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from maecho.errors import UploadError
from maecho.linalg.gaussians import RESIDUAL, Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal

Value = Any
"""One part, or a mapping of names to parts."""


class Kind(ABC):
    """How parts of one type are stored and handled. Only `suffixes`, `tensors` and `read` have no default."""

    suffixes: tuple[str, ...]
    """The ends of the keys of a part's tensors in files. "" is for a part that is a single tensor."""
    whole: Collection[str] = ()
    """The suffixes of tensors of whole numbers. All other tensors hold real numbers."""

    @abstractmethod
    def tensors(self, part: Any) -> dict[str, Tensor]:
        """The tensors of a part: suffix -> tensor."""

    @abstractmethod
    def read(self, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Any:
        """The inverse of `tensors` and `facts`. Raises ValueError or KeyError if the tensors do not fit."""

    def facts(self, part: Any) -> dict[str, tuple[int, ...]]:
        """What a file's header says about a part beside its tensors: shapes, which are public."""
        return {}

    def complaint(self, listed: Mapping[str, Tensor]) -> str | None:
        """What is wrong with the tensors of a part, in words that complete "… must"; None if nothing is. They have no
        values, since they were not read yet."""
        for suffix, tensor in listed.items():
            if suffix in self.whole and not is_whole(tensor):
                return f"be whole numbers, got {tensor.dtype}"
            if suffix not in self.whole and not tensor.is_floating_point():
                return f"be of floating point, got {tensor.dtype}"
        return None

    def size(self, part: Any) -> int:
        """The size of a part in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors(part).values())

    def on(self, part: Any, device: torch.device) -> Any:
        """The part on another device."""
        return self._changed(part, lambda tensor: tensor.to(device=device))

    def at(self, part: Any, dtype: torch.dtype) -> Any:
        """The part in another floating-point dtype. Whole numbers stay whole."""
        return self._changed(part, lambda tensor: tensor.to(dtype=dtype) if tensor.is_floating_point() else tensor)

    def _changed(self, part: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return self.read({end: change(tensor) for end, tensor in self.tensors(part).items()}, self.facts(part))

    def spectra(self, part: Any) -> list[Spectrum]:
        """The matrices of a part that can be cut."""
        return []

    def cut(self, part: Any, rank: Callable[[Spectrum], int], keep_variances: bool = True) -> Any:
        """Keep only the leading directions of every matrix."""
        return part

    def residual_bytes(self, part: Any) -> int:
        """How many bytes `cut` adds if it keeps variances."""
        return 0

    def ranks(self, part: Any) -> dict[str, int]:
        """Beginning of the suffixes -> how many directions the tensors with it hold. Of several matrices, the most."""
        return {}

    def plus(self, one: Any, other: Any) -> Any:
        """The sum of two parts."""
        raise TypeError(f"parts must be of a kind that can be added, got {type(one).__name__}")


class Tensors(Kind):
    """Parts that are tensors of real numbers."""

    suffixes = ("",)

    def tensors(self, part: Tensor) -> dict[str, Tensor]:
        return {"": part}

    def read(self, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Tensor:
        return found[""]

    def plus(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class Counts(Tensors):
    """Parts that are rows of whole numbers."""

    whole = ("",)

    def complaint(self, listed: Mapping[str, Tensor]) -> str | None:
        if listed[""].dim() != 1:
            return f"be one row of numbers, got the shape {tuple(listed[''].shape)}"
        return super().complaint(listed)


class Matrices(Kind):
    """Parts that are symmetric matrices. A `Diagonal` is stored as a `Spectrum` without a basis.

    With `keep_rest` a cut keeps the mean eigenvalue along the directions that it removes. Without it, a matrix
    is 0 there.
    """

    suffixes = ("values", "basis", "rest", "unit")

    def __init__(self, keep_rest: bool = True) -> None:
        self._keep_rest = keep_rest

    def tensors(self, part: Spectrum | Diagonal) -> dict[str, Tensor]:
        if isinstance(part, Diagonal):
            return {"values": part.values}
        more = {"rest": part.rest, "unit": part.sent_unit}
        return {"values": part.values, "basis": part.basis, **{n: t for n, t in more.items() if t is not None}}

    def read(self, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Spectrum | Diagonal:
        if "basis" in found:
            return Spectrum(found["values"], found["basis"], found.get("rest"), found.get("unit"))
        for name in ("rest", "unit"):
            if name in found:
                raise ValueError(f"a {name} must come with eigenvectors, got none")
        return Diagonal(found["values"])

    def complaint(self, listed: Mapping[str, Tensor]) -> str | None:
        wrong = super().complaint(listed)
        if wrong or "values" not in listed:
            return wrong
        for name in ("rest", "unit"):
            if name in listed and "basis" not in listed:
                return f"have eigenvectors beside a {name}, got none"
        malformed = self.read(listed, {}).malformed()
        return None if malformed is None else f"be {malformed}"

    def size(self, part: Spectrum | Diagonal) -> int:
        return part.bytes

    def on(self, part: Spectrum | Diagonal, device: torch.device) -> Spectrum | Diagonal:
        return part.to(device=device)

    def at(self, part: Spectrum | Diagonal, dtype: torch.dtype) -> Spectrum | Diagonal:
        """Eigenvalues stay float64."""
        return part.to(dtype=dtype)

    def spectra(self, part: Spectrum | Diagonal) -> list[Spectrum]:
        return [part] if isinstance(part, Spectrum) else []

    def cut(
        self, part: Spectrum | Diagonal, rank: Callable[[Spectrum], int], keep_variances: bool = True
    ) -> Spectrum | Diagonal:
        return part.cut(rank(part), keep_variances and self._keep_rest) if isinstance(part, Spectrum) else part

    def residual_bytes(self, part: Spectrum | Diagonal) -> int:
        if isinstance(part, Diagonal) or part.rest is not None or not self._keep_rest:
            return 0
        return len(part.values) * torch.float64.itemsize

    def ranks(self, part: Spectrum | Diagonal) -> dict[str, int]:
        return {"": part.rank}

    def plus(self, one: Spectrum | Diagonal, other: Spectrum | Diagonal) -> Spectrum | Diagonal:
        if isinstance(one, Diagonal) and isinstance(other, Diagonal):
            return one.plus(other)
        if isinstance(one, Diagonal) or isinstance(other, Diagonal):
            got = f"{type(one).__name__} and {type(other).__name__}"
            raise TypeError(f"matrices must be of one form to be added, got {got}")
        both = one.total().plus(other.total())
        return Spectrum.of_gram(both.matrix, both.bias)


class ManyGaussians(Kind):
    """Parts that are `Gaussians`."""

    suffixes = (
        "classes",
        "counts",
        "means",
        "covariances/ranks",
        "covariances/values",
        "covariances/basis",
        "residual",
        "residual_of_cosines",
    )
    whole = ("classes", "counts", "covariances/ranks")

    def tensors(self, part: Gaussians) -> dict[str, Tensor]:
        return part.tensors()

    def read(self, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Gaussians:
        return Gaussians.read(found, facts)

    def facts(self, part: Gaussians) -> dict[str, tuple[int, ...]]:
        return {"shape": part.shape}

    def complaint(self, listed: Mapping[str, Tensor]) -> str | None:
        if all(name in listed for name in RESIDUAL.values()):
            return f"have one of {' and '.join(RESIDUAL.values())}, got both"
        return super().complaint(listed)

    def size(self, part: Gaussians) -> int:
        return part.bytes

    def on(self, part: Gaussians, device: torch.device) -> Gaussians:
        return part.to(device=device)

    def at(self, part: Gaussians, dtype: torch.dtype) -> Gaussians:
        """Eigenvalues stay float64."""
        return part.to(dtype=dtype)

    def spectra(self, part: Gaussians) -> list[Spectrum]:
        return list(part.covariances)

    def cut(self, part: Gaussians, rank: Callable[[Spectrum], int], keep_variances: bool = True) -> Gaussians:
        return part.cut(rank, keep_variances)

    def residual_bytes(self, part: Gaussians) -> int:
        return part.residual_bytes

    def ranks(self, part: Gaussians) -> dict[str, int]:
        return {"covariances": max(covariance.rank for covariance in part.covariances)}

    def plus(self, one: Gaussians, other: Gaussians) -> Gaussians:
        return one.plus(other)


TENSORS, COUNTS, MATRICES, GAUSSIANS = Tensors(), Counts(), Matrices(), ManyGaussians()
PROJECTORS = Matrices(keep_rest=False)
"""Matrices whose cut directions count as 0: a client without a direction does not hold a model back along it."""


def entries(value: Value) -> dict[str, Any]:
    """The parts of a value by name. A value that is a single part gets the name ""."""
    return dict(value) if isinstance(value, Mapping) else {"": value}


def each(value: Value, function: Callable[[Any], Any]) -> Value:
    """Apply a function to every part of a value."""
    if isinstance(value, Mapping):
        return {name: function(part) for name, part in value.items()}
    return function(value)


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has a dtype of whole numbers. Truth values do not count as such."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_real(what: str, *tensors: Tensor | None) -> None:
    """Raise UploadError unless the tensors are of floating point. `what` begins the sentence."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            raise UploadError(f"{what} must be of floating point, got {tensor.dtype}")
