"""What one client sends, once, and its file.

An Upload is checked when it is made, whoever makes it, so that nothing after this module asks whether its numbers are
finite or its shapes fit. On disk it is one safetensors file with flat keys:

    weights/<name>   gram/<layer>/values|basis   projector/<layer>/values|basis   classes   moments/<part>
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from maecho import files
from maecho._version import __version__
from maecho.errors import UploadError
from maecho.layers import Layer
from maecho.moments import Moments
from maecho.spectra import Spectrum


@dataclass(frozen=True, eq=False)
class Upload:
    """What one client sends, once: its weights and what its inputs looked like."""

    client: str
    examples: int
    weights: Mapping[str, Tensor]
    """The state_dict; a tied tensor stands here once."""
    layers: tuple[Layer, ...] = ()
    """The matrices among the weights, in order of execution."""
    head: str | None = None
    """The layer whose rows are the classes."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names -> the name in `weights`."""
    grams: Mapping[str, Spectrum] = field(default_factory=dict)
    projectors: Mapping[str, Spectrum] = field(default_factory=dict)
    class_counts: Tensor | None = None
    moments: Moments | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How each statistic was made, and what else is worth knowing."""

    def __post_init__(self) -> None:
        if not isinstance(self.client, str) or not self.client.strip():
            raise UploadError(f"a client must have a name, got {self.client!r}")
        for name in ("weights", "aliases", "grams", "projectors", "recipe"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        _check_weights(self)
        _check_spectra(self, "gram", float("inf"))
        _check_spectra(self, "projector", 1.0)
        _check_classes(self)
        if self.moments is not None:
            _check_moments(self, self.moments)

    @property
    def has(self) -> frozenset[str]:
        """The statistics that it carries."""
        carried = {
            "gram": bool(self.grams) or not self.layers,
            "projector": bool(self.projectors) or not self.layers,
            "classes": self.class_counts is not None,
            "moments": self.moments is not None,
        }
        return frozenset(name for name, there in carried.items() if there)

    @property
    def fingerprint(self) -> str:
        """Equal for equal architectures: names, shapes and dtypes of the weights, and how they are read as matrices."""
        return hashlib.sha256(json.dumps(self.architecture(), sort_keys=True).encode()).hexdigest()[:16]

    def architecture(self) -> dict[str, Any]:
        return {
            "weights": {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in self.weights.items()},
            "layers": {layer.name: asdict(layer) for layer in self.layers},
            "head": self.head,
            "aliases": dict(self.aliases),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The client's own model."""
        return {**self.weights, **{name: self.weights[kept] for name, kept in self.aliases.items()}}

    def save(self, path: str | Path) -> None:
        about = {
            "client": self.client,
            "examples": self.examples,
            "fingerprint": self.fingerprint,
            "statistics": sorted(self.has),
            "layers": [asdict(layer) for layer in self.layers],
            "head": self.head,
            "aliases": dict(self.aliases),
            "input_shape": None if self.moments is None else list(self.moments.shape),
            "recipe": dict(self.recipe),
            "made_by": f"maecho {__version__}",
        }
        files.write_tensors(Path(path), "upload", self.tensors(), about)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that leaves the client, by the keys of the file."""
        out = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        for kind, spectra in (("gram", self.grams), ("projector", self.projectors)):
            for name, spectrum in spectra.items():
                out |= _spectrum_tensors(f"{kind}/{name}", spectrum)
        if self.class_counts is not None:
            out["classes"] = self.class_counts
        if self.moments is not None:
            m = self.moments
            out |= {"moments/classes": m.classes, "moments/counts": m.counts, "moments/means": m.means}
            out |= _spectrum_tensors("moments/covariances", m.covariances)
        return out

    @classmethod
    def load(cls, path: str | Path, only: Collection[str] | None = None) -> Upload:
        """Read a file; with `only`, of the statistics just these. Raises UploadError unless it is a sound upload."""
        path = Path(path)
        about = files.read_about(path, "upload")
        kept = None if only is None else {"weights", "classes", *only}
        tensors = files.read_tensors(path, lambda name: kept is None or name.split("/")[0] in kept)
        try:
            weights = {k.removeprefix("weights/"): t for k, t in tensors.items() if k.startswith("weights/")}
            upload = cls(
                client=about["client"],
                examples=about["examples"],
                weights=weights,
                layers=tuple(Layer(**layer) for layer in about["layers"]),
                head=about["head"],
                aliases=about["aliases"],
                grams=_read_spectra("gram", tensors),
                projectors=_read_spectra("projector", tensors),
                class_counts=tensors.get("classes"),
                moments=_read_moments(tensors, about["input_shape"]),
                recipe=about["recipe"],
            )
        except UploadError as error:
            raise UploadError(f"{path}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UploadError(
                f"{path} must be a maecho upload, got one whose parts do not fit together ({error})"
            ) from error
        if upload.fingerprint != about["fingerprint"]:
            raise UploadError(
                f"{path}: {upload.client}'s weights must be of the architecture {about['fingerprint']} that the file "
                f"names, got {upload.fingerprint}"
            )
        return upload


def _spectrum_tensors(key: str, spectrum: Spectrum) -> dict[str, Tensor]:
    parts = {f"{key}/values": spectrum.values}
    return parts if spectrum.basis is None else {**parts, f"{key}/basis": spectrum.basis}


def _read_spectra(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Spectrum]:
    ends = (f"{kind}/", "/values")
    names = [
        k.removeprefix(ends[0]).removesuffix(ends[1]) for k in tensors if k.startswith(ends[0]) and k.endswith(ends[1])
    ]
    return {n: Spectrum(tensors[f"{kind}/{n}/values"], tensors.get(f"{kind}/{n}/basis")) for n in names}


def _read_moments(tensors: Mapping[str, Tensor], shape: list[int] | None) -> Moments | None:
    if "moments/means" not in tensors or shape is None:
        return None
    return Moments(
        classes=tensors["moments/classes"],
        counts=tensors["moments/counts"],
        means=tensors["moments/means"],
        covariances=_read_spectra("moments", tensors)["covariances"],
        shape=tuple(shape),
    )


def _check_weights(upload: Upload) -> None:
    if isinstance(upload.examples, bool) or not isinstance(upload.examples, int) or upload.examples < 1:
        raise UploadError(f"{upload.client}: the number of examples must be at least 1, got {upload.examples!r}")
    if not upload.weights:
        raise UploadError(f"{upload.client}: an upload must carry weights, got none")
    for name, tensor in upload.weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UploadError(f"{upload.client}: weight {name!r} must be finite, got NaN or infinity")
    for layer in upload.layers:
        for part in (layer.weight, layer.bias):
            if part is not None and part not in upload.weights:
                raise UploadError(f"{upload.client}: layer {layer.name!r} must have its weight {part!r}, got none")


def _check_spectra(upload: Upload, kind: str, largest: float) -> None:
    spectra: dict[str, Spectrum] = dict(upload.grams if kind == "gram" else upload.projectors)
    if not spectra:
        return
    layers = {layer.name: layer for layer in upload.layers}
    for name in layers.keys() ^ spectra.keys():
        expected, came = ("one", "none") if name in layers else ("none, there is no such layer", "one")
        raise UploadError(f"{upload.client}: {kind} of {name!r}: expected {expected}, got {came}")
    for name, found in spectra.items():
        if isinstance(found, Tensor):
            found = spectra[name] = _from_dense(upload.client, kind, name, found)
        groups, _, d = layers[name].shape(upload.weights)
        got = (found.values.shape[0], found.width)
        if got != (groups, d):
            raise UploadError(
                f"{upload.client}: {kind} of {name!r} must be {d}x{d} in {groups} group(s) to match its weight, "
                f"got {got[1]}x{got[1]} in {got[0]}"
            )
        wrong = found.complaint(largest)
        if wrong:
            raise UploadError(f"{upload.client}: {kind} of {name!r} must be {wrong}")
    object.__setattr__(upload, f"{kind}s", MappingProxyType(spectra))


def _from_dense(client: str, kind: str, name: str, matrix: Tensor) -> Spectrum:
    """A statistic may also be given as a plain d by d matrix."""
    if matrix.dim() not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
        raise UploadError(f"{client}: {kind} of {name!r} must be a square matrix, got shape {tuple(matrix.shape)}")
    try:
        return Spectrum.of_dense(matrix.reshape(-1, *matrix.shape[-2:])).to(dtype=torch.float32)
    except ValueError as error:
        raise UploadError(f"{client}: {kind} of {name!r} must be {error}") from error


def _check_classes(upload: Upload) -> None:
    counts = upload.class_counts
    if counts is None:
        return
    if counts.dim() != 1 or counts.is_floating_point() or bool((counts < 0).any()):
        raise UploadError(
            f"{upload.client}: class counts must be one whole number a class, none negative, got {counts}"
        )
    if int(counts.sum()) != upload.examples:
        raise UploadError(
            f"{upload.client}: class counts must sum to its {upload.examples} examples, got {int(counts.sum())}"
        )


def _check_moments(upload: Upload, moments: Moments) -> None:
    if not moments.means.isfinite().all():
        raise UploadError(f"{upload.client}: class means must be finite, got NaN or infinity")
    wrong = moments.covariances.complaint()
    if wrong:
        raise UploadError(f"{upload.client}: class covariances must be {wrong}")
