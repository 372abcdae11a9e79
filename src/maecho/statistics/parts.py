"""The parts of the values of statistics: how they are written, read, cut and moved, whatever statistic they belong to.

A value is one part, or a mapping of names (layers, weights) to parts. A part is a tensor, a symmetric matrix
(`Spectrum` or `Diagonal`) or `Gaussians`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from maecho.errors import UploadError
from maecho.linalg.gaussians import Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal

Part = Tensor | Spectrum | Diagonal | Gaussians
Value = Part | Mapping[str, Part]

SUFFIXES: dict[type, tuple[str, ...]] = {
    Tensor: ("",),
    Spectrum: ("values", "basis"),
    Gaussians: (
        "classes",
        "counts",
        "means",
        "covariances/ranks",
        "covariances/values",
        "covariances/basis",
        "residual",
        "residual_of_cosines",
    ),
}
"""The ends of the keys of a part's tensors in files. A `Diagonal` is stored as a `Spectrum` without a basis."""


def entries(value: Value) -> dict[str, Part]:
    """The parts of a value by name. A value that is a single part gets the name ""."""
    return dict(value) if isinstance(value, Mapping) else {"": value}


def each(value: Value, function: Callable[[Part], Part]) -> Value:
    """Apply a function to every part of a value."""
    if isinstance(value, Mapping):
        return {name: function(part) for name, part in value.items()}
    return function(value)


def tensors(part: Part) -> dict[str, Tensor]:
    """The tensors of a part: suffix -> tensor."""
    if isinstance(part, Tensor):
        return {"": part}
    if isinstance(part, Diagonal):
        return {"values": part.values}
    if isinstance(part, Spectrum):
        return {"values": part.values, "basis": part.basis}
    return part.tensors()


def read(kind: type, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Part:
    """The inverse of `tensors`, for a part of this kind. Raises ValueError or KeyError if the tensors do not fit."""
    if kind is Tensor:
        return found[""]
    if kind is Spectrum:
        return Spectrum(found["values"], found["basis"]) if "basis" in found else Diagonal(found["values"])
    return Gaussians.read(found, facts)


def facts(part: Part) -> dict[str, tuple[int, ...]]:
    """What a file's header says about a part beside its tensors: shapes, which are public."""
    return {"shape": part.shape} if isinstance(part, Gaussians) else {}


def size(part: Part) -> int:
    """The size of a part in bytes."""
    return part.nbytes if isinstance(part, Tensor) else part.bytes


def on(part: Part, device: torch.device) -> Part:
    """The part on another device."""
    return part.to(device=device)


def at(part: Part, dtype: torch.dtype) -> Part:
    """The part in another floating-point dtype. Eigenvalues stay float64, and whole numbers stay whole."""
    if isinstance(part, Tensor) and not part.is_floating_point():
        return part
    return part.to(dtype=dtype)


def spectra(part: Part) -> list[Spectrum]:
    """The matrices of a part that can be cut."""
    if isinstance(part, Spectrum):
        return [part]
    return list(part.covariances) if isinstance(part, Gaussians) else []


def cut(part: Part, rank: Callable[[Spectrum], int], keep_variances: bool = True) -> Part:
    """Keep only the leading directions of every matrix."""
    if isinstance(part, Spectrum):
        return part.cut(rank(part))
    return part.cut(rank, keep_variances) if isinstance(part, Gaussians) else part


def residual_bytes(part: Part) -> int:
    """How many bytes `cut` adds if it keeps variances."""
    return part.residual_bytes if isinstance(part, Gaussians) else 0


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has a dtype of whole numbers. Truth values do not count as such."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_real(what: str, *tensors: Tensor | None) -> None:
    """Raise UploadError unless the tensors are of floating point. `what` begins the sentence."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            raise UploadError(f"{what} must be of floating point, got {tensor.dtype}")


def ranks(part: Part) -> dict[str, int]:
    """Beginning of the suffixes -> how many directions the tensors with it hold. Of several matrices, the most."""
    if isinstance(part, Gaussians):
        return {"covariances": max(covariance.rank for covariance in part.covariances)}
    return {} if isinstance(part, Tensor) else {"": part.rank}


def plus(one: Part, other: Part) -> Part:
    """The sum of two parts of the same kind."""
    if isinstance(one, Spectrum) and isinstance(other, Spectrum):
        return Spectrum.of_dense(one.dense().double() + other.dense().double())
    if isinstance(one, Diagonal) and isinstance(other, Diagonal):
        return one.plus(other)
    if isinstance(one, Gaussians) and isinstance(other, Gaussians):
        return one.plus(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one + other
    raise TypeError(f"parts must be of one kind to be added, got {type(one).__name__} and {type(other).__name__}")
