"""What values of statistics are made of, and what can be done with each part without knowing what it says.

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
"""How the tensors of a part are called in files, after its name. A `Diagonal` is a `Spectrum` without a basis."""


def entries(value: Value) -> dict[str, Part]:
    """The parts of a value by name; a value that is one part has the name ""."""
    return dict(value) if isinstance(value, Mapping) else {"": value}


def each(value: Value, function: Callable[[Part], Part]) -> Value:
    """The value with every part changed."""
    if isinstance(value, Mapping):
        return {name: function(part) for name, part in value.items()}
    return function(value)


def tensors(part: Part) -> dict[str, Tensor]:
    """By suffix."""
    if isinstance(part, Tensor):
        return {"": part}
    if isinstance(part, Diagonal):
        return {"values": part.values}
    if isinstance(part, Spectrum):
        return {"values": part.values, "basis": part.basis}
    return part.tensors()


def read(kind: type, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Part:
    """The inverse of `tensors`, for a part of this kind. Raises ValueError or KeyError where tensors do not fit."""
    if kind is Tensor:
        return found[""]
    if kind is Spectrum:
        return Spectrum(found["values"], found["basis"]) if "basis" in found else Diagonal(found["values"])
    return Gaussians.read(found, facts)


def facts(part: Part) -> dict[str, tuple[int, ...]]:
    """What a header says of a part beside its tensors: shapes, which are public."""
    return {"shape": part.shape} if isinstance(part, Gaussians) else {}


def size(part: Part) -> int:
    """In bytes."""
    return part.nbytes if isinstance(part, Tensor) else part.bytes


def on(part: Part, device: torch.device) -> Part:
    """The part on another device."""
    return part.to(device=device)


def at(part: Part, dtype: torch.dtype) -> Part:
    """The part with real numbers in another dtype; eigenvalues stay float64, and whole numbers stay whole."""
    if isinstance(part, Tensor) and not part.is_floating_point():
        return part
    return part.to(dtype=dtype)


def spectra(part: Part) -> list[Spectrum]:
    """The matrices that can be cut down."""
    if isinstance(part, Spectrum):
        return [part]
    return list(part.covariances) if isinstance(part, Gaussians) else []


def cut(part: Part, rank: Callable[[Spectrum], int], keep_variances: bool = True) -> Part:
    """The leading directions of every matrix alone."""
    if isinstance(part, Spectrum):
        return part.cut(rank(part))
    return part.cut(rank, keep_variances) if isinstance(part, Gaussians) else part


def residual_bytes(part: Part) -> int:
    """What `cut` adds where it keeps variances."""
    return part.residual_bytes if isinstance(part, Gaussians) else 0


def is_whole(tensor: Tensor) -> bool:
    """Whether it holds whole numbers; truth values are none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_real(what: str, *tensors: Tensor | None) -> None:
    """Raises UploadError unless they are of floating point, as sums and directions are. `what` begins the sentence."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            raise UploadError(f"{what} must be of floating point, got {tensor.dtype}")


def ranks(part: Part) -> dict[str, int]:
    """Directions kept, by the beginning of the suffixes of the tensors that hold them; of several the most."""
    if isinstance(part, Gaussians):
        return {"covariances": max(covariance.rank for covariance in part.covariances)}
    return {} if isinstance(part, Tensor) else {"": part.rank}


def plus(one: Part, other: Part) -> Part:
    """The sum of two parts of one kind."""
    if isinstance(one, Spectrum) and isinstance(other, Spectrum):
        return Spectrum.of_dense(one.dense().double() + other.dense().double())
    if isinstance(one, Diagonal) and isinstance(other, Diagonal):
        return one.plus(other)
    if isinstance(one, Gaussians) and isinstance(other, Gaussians):
        return one.plus(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one + other
    raise TypeError(f"parts must be of one kind to be added, got {type(one).__name__} and {type(other).__name__}")
