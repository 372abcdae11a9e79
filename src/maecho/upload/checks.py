"""What makes an upload sound. A failed check is one sentence: the client, what was expected, what came."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.errors import UploadError
from maecho.linalg.spectra import TOLERANCE, Spectrum
from maecho.statistics.gaussians import NO_CLASS, Moments
from maecho.upload import header

if TYPE_CHECKING:
    from maecho.upload.upload import Upload

MOST_CLASSES = 2**24
"""Where an upload does not say how many there are. Labels are counted by their number, so a huge one takes memory."""


def weights(upload: Upload) -> None:
    """Name, number of examples, weights, and the layers that are read from them."""
    header.check_client(upload.client, upload.examples)
    header.check_recipe(upload.client, upload.recipe)
    for name, tensor in upload.weights.items():
        if not isinstance(tensor, Tensor):
            raise UploadError(f"{upload.client}: weight {name!r} must be a tensor, got {type(tensor).__name__}")
    header.check_architecture(upload.client, upload.weights, upload.layers, upload.head, upload.aliases)
    for name, tensor in upload.weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UploadError(f"{upload.client}: weight {name!r} must be finite, got NaN or infinity")


def spectra(upload: Upload, kind: str, found: Mapping[str, Spectrum | Tensor]) -> dict[str, Spectrum]:
    """One a layer, of the size of its inputs (of its outputs for gradients), symmetric, with no eigenvalue below 0, nor
    above 1 for a projector.

    A plain d by d matrix is accepted and brought into factored form.
    """
    if not found:
        return {}
    client, layers = upload.client, {layer.name: layer for layer in upload.layers}
    for name in sorted(layers.keys() ^ found.keys()):
        expected, came = ("one", "none") if name in layers else ("none, there is no such layer", "one")
        raise UploadError(f"{client}: {kind} of {name!r}: expected {expected}, got {came}")
    checked = {}
    of_outputs, largest = kind == "gradients", 1.0 if kind == "projector" else math.inf
    for name, one in found.items():
        groups, out, d = layers[name].shape(upload.weights)
        d = out if of_outputs else d
        spectrum = _from_dense(f"{client}: {kind} of {name!r}", one) if isinstance(one, Tensor) else one
        if not isinstance(spectrum, Spectrum):
            raise UploadError(f"{client}: {kind} of {name!r} must be a Spectrum or a matrix, got {type(one).__name__}")
        if spectrum.basis is None and (of_outputs or not layers[name].transposed):
            raise UploadError(f"{client}: {kind} of {name!r} must have eigenvectors, got eigenvalues alone")
        real(f"{client}: {kind} of {name!r}", spectrum.values, spectrum.basis)
        wrong = spectrum.malformed()
        if wrong:
            raise UploadError(f"{client}: {kind} of {name!r} must be {wrong}")
        got = (spectrum.values.shape[0], spectrum.width)
        if got != (groups, d):
            raise UploadError(
                f"{client}: {kind} of {name!r} must be {d}x{d} in {groups} group(s) to match its weight, "
                f"got {got[1]}x{got[1]} in {got[0]}"
            )
        wrong = spectrum.complaint(largest)
        if wrong:
            raise UploadError(f"{client}: {kind} of {name!r} must be {wrong}")
        checked[name] = spectrum
    return checked


def _from_dense(what: str, matrix: Tensor) -> Spectrum:
    if matrix.dim() not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
        raise UploadError(f"{what} must be a square matrix, got shape {tuple(matrix.shape)}")
    try:
        return Spectrum.of_dense(matrix.reshape(-1, *matrix.shape[-2:])).to(dtype=torch.float32)
    except ValueError as error:
        raise UploadError(f"{what} must be {error}") from error


def classes(upload: Upload) -> None:
    counts = upload.class_counts
    if counts is None:
        return
    if counts.dim() != 1 or not _is_whole(counts) or bool((counts < 0).any()):
        raise UploadError(
            f"{upload.client}: class counts must be one whole number a class, none negative, got {counts.tolist()}"
        )
    head = next((layer for layer in upload.layers if layer.name == upload.head), None)
    if head is not None and len(counts) != head.shape(upload.weights)[1]:
        raise UploadError(
            f"{upload.client}: class counts must be of the {head.shape(upload.weights)[1]} classes of the head, "
            f"got {len(counts)}"
        )
    total = sum(counts.tolist())  # of Python's numbers: sums of torch's wrap at 2**63
    if total != upload.examples:
        raise UploadError(f"{upload.client}: class counts must sum to its {upload.examples} examples, got {total}")


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype != torch.bool


def real(what: str, *tensors: Tensor | None) -> None:
    """Statistics that are sums or directions are of floating point, whatever a file may hold."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            raise UploadError(f"{what} must be of floating point, got {tensor.dtype}")


def targets(upload: Upload) -> None:
    found = upload.targets
    if found is None:
        return
    head = next((layer for layer in upload.layers if layer.name == upload.head), None)
    if head is None:
        raise UploadError(f"{upload.client}: targets must come with a head, got none")
    if not isinstance(found, Tensor) or tuple(found.shape) != head.shape(upload.weights)[1:]:
        expected, got = head.shape(upload.weights)[1:], tuple(found.shape) if isinstance(found, Tensor) else found
        raise UploadError(f"{upload.client}: targets must be {expected}, classes by inputs of the head, got {got}")
    real(f"{upload.client}: targets", found)
    if not found.isfinite().all():
        raise UploadError(f"{upload.client}: targets must be finite, got NaN or infinity")
    counted = float(found.double()[:, -1].sum())
    if head.bias is not None and not math.isclose(counted, upload.examples, rel_tol=TOLERANCE):
        raise UploadError(
            f"{upload.client}: targets must count its {upload.examples} examples in the column of the bias, "
            f"got {counted:.6g}"
        )


def fisher(upload: Upload) -> None:
    """Of every layer, and of whatever other parameters there are; of their shapes, not negative."""
    if not upload.fisher:
        return
    client, weights = upload.client, upload.weights
    for name in (part for layer in upload.layers for part in (layer.weight, layer.bias)):
        if name is not None and name not in upload.fisher:
            raise UploadError(f"{client}: fisher of {name!r}: expected one, got none")
    for name, found in upload.fisher.items():
        if name not in weights or not weights[name].is_floating_point():
            raise UploadError(f"{client}: fisher of {name!r}: expected none, there is no such parameter, got one")
        if not isinstance(found, Tensor) or found.shape != weights[name].shape:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UploadError(f"{client}: fisher of {name!r} must be {tuple(weights[name].shape)} as it is, got {got}")
        real(f"{client}: fisher of {name!r}", found)
        if not found.isfinite().all():
            raise UploadError(f"{client}: fisher of {name!r} must be finite, got NaN or infinity")
        if found.numel() and float(found.min()) < 0:
            raise UploadError(f"{client}: fisher of {name!r} must not be negative, got {float(found.min()):.3g}")


def moments(upload: Upload, found: Moments, of: str = "") -> None:
    """`of`: what they are moments of, where it is not the raw inputs."""
    client = upload.client
    real(f"{client}: class means and variances{of}", found.means, found.residual)
    if not found.means.isfinite().all():
        raise UploadError(f"{client}: class means{of} must be finite, got NaN or infinity")
    if not _is_whole(found.counts) or not _is_whole(found.classes):
        got = ", ".join(str(tensor.dtype) for tensor in (found.classes, found.counts))
        raise UploadError(f"{client}: classes and counts of the class moments{of} must be whole numbers, got {got}")
    total = sum(found.counts.tolist())
    if total != upload.examples or bool((found.counts < 1).any()):
        raise UploadError(
            f"{client}: counts of the class moments{of} must be positive and sum to its {upload.examples} examples, "
            f"got {total}"
        )
    labels = MOST_CLASSES if upload.class_counts is None else len(upload.class_counts)
    lowest, highest = (int(end) for end in found.classes.aminmax())
    if lowest < NO_CLASS or highest >= labels:
        raise UploadError(
            f"{client}: classes of the class moments{of} must lie in 0 … {labels - 1}, or be {NO_CLASS} for no class, "
            f"got {lowest} … {highest}"
        )
    for covariance in found.covariances:
        real(f"{client}: class covariances{of}", covariance.values, covariance.basis)
        wrong = covariance.complaint()
        if wrong:
            raise UploadError(f"{client}: class covariances{of} must be {wrong}")
    if found.residual is not None and not bool((found.residual.isfinite() & (found.residual >= 0)).all()):
        low = float(found.residual.min())
        raise UploadError(
            f"{client}: what is left of the class variances{of} must be finite and not negative, got {low:.3g}"
        )


def features(upload: Upload) -> None:
    """Moments of what reaches a layer, of as many inputs as it has, one Gaussian a class."""
    by_name = {layer.name: layer for layer in upload.layers}
    for name, found in upload.features.items():
        if name not in by_name:
            raise UploadError(f"{upload.client}: features of {name!r}: expected none, there is no such layer, got some")
        groups, _, d = by_name[name].shape(upload.weights)
        d -= by_name[name].bias is not None
        if groups > 1 or found.shape != (d,):
            raise UploadError(
                f"{upload.client}: features of {name!r} must be of its {groups * d} inputs, got {found.shape}"
            )
        moments(upload, found, f" of {name!r}")
        classes = found.classes.tolist()
        own = None if upload.moments is None else set(upload.moments.classes.tolist())
        if len(classes) > len(set(classes)) or (own is not None and set(classes) != own):
            raise UploadError(
                f"{upload.client}: features of {name!r} must be one Gaussian for each class that it has, got {classes}"
            )
