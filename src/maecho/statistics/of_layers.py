"""Statistics with one symmetric matrix for each layer: how such matrices are checked and moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from maecho.errors import InputError, UploadError
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal
from maecho.network.layers import Layer
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

    def check(self, value: Any, carrier: Carrier) -> Any:
        """Every layer must have one, of the layer's size, symmetric, with eigenvalues from 0 to `largest`.

        A plain d by d matrix is brought into factored form.
        """
        by_name = {layer.name: layer for layer in carrier.layers}
        what = f"{carrier.client}: {self.name}"
        for name in sorted(by_name.keys() ^ value.keys()):
            if name in by_name:
                raise UploadError(f"{what} must have a matrix for {name!r}, got none")
            raise UploadError(f"{what} must be of layers of the network, got a matrix for {name!r}")
        return {
            name: check_matrix(f"{what} of {name!r}", matrix, *self._shape(by_name[name], carrier), self.largest)
            for name, matrix in value.items()
        }

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


def check_matrix(what: str, matrix: Any, groups: int, d: int, diagonal: bool, largest: float) -> Any:
    """Check a matrix, factored or plain, and return it in factored form. `what` begins the sentence of an error."""
    if isinstance(matrix, Tensor):
        matrix = _factored(what, matrix)
    if not isinstance(matrix, Spectrum | Diagonal):
        raise UploadError(f"{what} must be a Spectrum or a matrix, got {type(matrix).__name__}")
    if isinstance(matrix, Diagonal) and not diagonal:
        raise UploadError(f"{what} must have eigenvectors, got eigenvalues alone")
    if isinstance(matrix, Spectrum) and diagonal:
        raise UploadError(f"{what} must be a Diagonal, since the layer's inputs are tokens, got eigenvectors")
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
    return matrix


def _factored(what: str, matrix: Tensor) -> Spectrum:
    if matrix.dim() not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
        raise UploadError(f"{what} must be a square matrix, got shape {tuple(matrix.shape)}")
    try:
        return Spectrum.of_dense(matrix.reshape(-1, *matrix.shape[-2:])).to(dtype=torch.float32)
    except ValueError as error:
        raise UploadError(f"{what} must be {error}") from error
