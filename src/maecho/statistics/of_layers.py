"""Statistics with one symmetric matrix for each layer: how such matrices are checked and moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from maecho.errors import InputError, UploadError
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal
from maecho.network.layers import Layer, find
from maecho.network.spaces import Move
from maecho.statistics.parts import MATRICES, check_real
from maecho.statistics.statistic import Carrier, Found, Statistic

Matrix = TypeVar("Matrix", bound=Spectrum | Diagonal)


class OfLayers(Statistic):
    """A statistic with one symmetric matrix for each layer."""

    kind = MATRICES
    by_name = True
    largest: ClassVar[float] = float("inf")
    """The largest eigenvalue that a matrix may have."""
    of_outputs: ClassVar[bool] = False
    """Whether a matrix is as wide as the outputs of its layer. If not, it is as wide as the inputs."""
    with_constant: ClassVar[bool] = False
    """Whether the constant input of a layer with a bias has a unit of its own; see linalg/units.py."""

    def check(self, value: Any, carrier: Carrier) -> Any:
        """Every layer must have one, of the layer's size, symmetric, with eigenvalues from 0 to `largest`.

        A plain d by d matrix is brought into factored form.
        """
        self.check_names(value.keys(), carrier)
        return {name: self.check_part(name, matrix, carrier) for name, matrix in value.items()}

    def check_names(self, names: Collection[str], carrier: Carrier) -> None:
        known = {layer.name for layer in carrier.layers}
        what = f"{carrier.client}: {self.name}"
        for name in sorted(known ^ set(names)):
            if name in known:
                raise UploadError(f"{what} must have a matrix for {name!r}, got none")
            raise UploadError(f"{what} must be of layers of the network, got a matrix for {name!r}")

    def check_part(self, name: str, part: Any, carrier: Carrier) -> Any:
        layer = find(carrier.layers, name)
        assert layer is not None  # `check_names` has seen to that
        what, constant = f"{carrier.client}: {self.name} of {name!r}", self.with_constant and layer.bias is not None
        return check_matrix(what, part, *self._shape(layer, carrier), self.largest, constant)

    def _shape(self, layer: Layer, carrier: Carrier) -> tuple[int, int, bool]:
        """The number of groups, the width, and whether the matrix is a diagonal."""
        groups, out, d = layer.shape(carrier.weights)
        return groups, out if self.of_outputs else d, layer.one_hot and not self.of_outputs

    def moved(self, value: Any, carrier: Carrier, move: Move) -> Any:
        out = dict(value)
        for layer in move.layers(carrier.layers, outputs=self.of_outputs):
            if layer.name in out:
                carry = move.outputs if self.of_outputs else move.inputs
                out[layer.name] = carry(out[layer.name], layer)
        return out


def for_layers(client: str, layers: Iterable[Layer], make: Callable[[Layer], Matrix]) -> dict[str, Matrix]:
    """Make a matrix for each layer. Raises InputError, with the layer's name, if the data make the matrix unsound."""
    made = {}
    for layer in layers:
        try:
            made[layer.name] = make(layer)
        except ValueError as error:
            raise InputError(f"{client}: the inputs of layer {layer.name!r} must be {error}") from error
    return made


def widths(found: Found, of_outputs: bool = False) -> list[int]:
    """The width of every matrix."""
    shapes = [layer.shape(found.weights) for layer in found.layers if of_outputs or not layer.one_hot]
    return [out if of_outputs else d for groups, out, d in shapes for _ in range(groups)]


def check_matrix(
    what: str, matrix: Any, groups: int, d: int, diagonal: bool, largest: float, constant: bool = False
) -> Any:
    """Check a matrix, factored or plain, and return it in factored form. `what` begins the sentence of an error.

    `constant` says whether its last input is the constant of a bias. A matrix that does not give the unit of that
    constant is measured in the unit in which it is 1.
    """
    if isinstance(matrix, Tensor):
        matrix = _factored(what, matrix, constant)
    if not isinstance(matrix, Spectrum | Diagonal):
        raise UploadError(f"{what} must be a Spectrum or a matrix, got {type(matrix).__name__}")
    if isinstance(matrix, Diagonal) and not diagonal:
        raise UploadError(f"{what} must have eigenvectors, got eigenvalues alone")
    if isinstance(matrix, Spectrum) and diagonal:
        raise UploadError(f"{what} must be a Diagonal, since the layer's inputs are tokens, got eigenvectors")
    if isinstance(matrix, Spectrum) and matrix.unit is not None and not constant:
        raise UploadError(f"{what} must have no unit beside inputs without a constant, got one")
    check_real(what, *MATRICES.tensors(matrix).values())
    wrong = matrix.malformed()
    if wrong:
        raise UploadError(f"{what} must be {wrong}")
    got = (matrix.values.shape[0], matrix.width)
    if got != (groups, d):
        raise UploadError(
            f"{what} must be {d}x{d} in {groups} group(s) to match its weight, got {got[1]}x{got[1]} in {got[0]}"
        )
    wrong = matrix.complaint(largest)
    if wrong:
        raise UploadError(f"{what} must be {wrong}")
    if isinstance(matrix, Spectrum) and matrix.unit is None and constant:
        return replace(matrix, unit=torch.ones(groups, dtype=torch.float64, device=matrix.values.device))
    return matrix


def _factored(what: str, matrix: Tensor, constant: bool) -> Spectrum:
    if matrix.dim() not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
        raise UploadError(f"{what} must be a square matrix, got shape {tuple(matrix.shape)}")
    try:
        return Spectrum.of_gram(matrix.reshape(-1, *matrix.shape[-2:]), constant).to(dtype=torch.float32)
    except ValueError as error:
        raise UploadError(f"{what} must be {error}") from error
