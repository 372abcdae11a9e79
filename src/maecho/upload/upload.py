"""What one client sends, once, and its file.

An Upload is checked when it is made, whoever makes it, so that nothing after this module asks whether its numbers are
finite or its shapes fit. On disk it is one safetensors file with flat keys:

    weights/<name>   gram/<layer>/values|basis   projector/<layer>/values|basis   classes   moments/<part>
    features/<layer>/<part>   targets   fisher/<weight>   gradients/<layer>/values|basis

with the parts classes, counts, means, residual of moments, and of their covariances ranks, values and basis: the
directions of all classes in one row, as many of each as `ranks` says.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from maecho import devices
from maecho.errors import UploadError
from maecho.linalg.spectra import Spectrum
from maecho.network.layers import Layer
from maecho.network.spaces import Spaces
from maecho.statistics.gather import STATISTICS
from maecho.statistics.gaussians import Moments
from maecho.upload import checks
from maecho.upload import header as headers
from maecho.upload import storage as files

SPECTRA = {"gram": "grams", "projector": "projectors", "gradients": "gradients"}
"""Statistics of one symmetric matrix a layer: the name in files, and the field of an Upload."""


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
    spaces: Spaces | None = None
    """Which axes are the same neurons, where the network could be traced; what matching needs."""
    grams: Mapping[str, Spectrum] = field(default_factory=dict)
    projectors: Mapping[str, Spectrum] = field(default_factory=dict)
    class_counts: Tensor | None = None
    moments: Moments | None = None
    """Of the raw inputs."""
    features: Mapping[str, Moments] = field(default_factory=dict)
    """Of what reaches a layer that all examples pass through, by its name."""
    targets: Tensor | None = None
    """Sums of the head's inputs by class [classes, inputs]."""
    fisher: Mapping[str, Tensor] = field(default_factory=dict)
    """The diagonal of the Fisher information, by the name and of the shape of the weight."""
    gradients: Mapping[str, Spectrum] = field(default_factory=dict)
    """Grams of the gradients at the layers' outputs."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How each statistic was made, and what else is worth knowing."""

    def __post_init__(self) -> None:
        for name in ("weights", "aliases", "grams", "projectors", "features", "fisher", "gradients", "recipe"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        checks.weights(self)
        for kind, part in SPECTRA.items():
            object.__setattr__(self, part, MappingProxyType(checks.spectra(self, kind, getattr(self, part))))
        checks.classes(self)
        checks.targets(self)
        checks.fisher(self)
        if self.moments is not None:
            checks.moments(self, self.moments)
        checks.features(self)
        headers.check_spaces(self.client, self.weights, self.spaces)

    @property
    def has(self) -> frozenset[str]:
        """The statistics that it carries."""
        carried = {
            "gram": bool(self.grams) or not self.layers,
            "projector": bool(self.projectors) or not self.layers,
            "classes": self.class_counts is not None,
            "moments": self.moments is not None,
            "features": bool(self.features),
            "targets": self.targets is not None,
            "fisher": bool(self.fisher),
            "gradients": bool(self.gradients) or not self.layers,
        }
        return frozenset(name for name, there in carried.items() if there)

    @property
    def fingerprint(self) -> str:
        """Equal for equal architectures: names, shapes and dtypes of the weights, and how they are read as matrices."""
        return headers.fingerprint(self.weights, self.layers, self.head, self.aliases)

    def architecture(self) -> dict[str, Any]:
        return headers.architecture(self.weights, self.layers, self.head, self.aliases)

    def state_dict(self) -> dict[str, Tensor]:
        """The client's own model."""
        return {**self.weights, **{name: self.weights[kept] for name, kept in self.aliases.items()}}

    def to(self, device: devices.Device) -> Upload:
        """The same upload with every tensor on this device. Checked at birth, its values are not looked at again."""
        found = devices.find(device)
        moved = copy.copy(self)
        for part in ("weights", "features", "fisher", *SPECTRA.values()):
            tensors = {name: _moved(one, found) for name, one in getattr(self, part).items()}
            object.__setattr__(moved, part, MappingProxyType(tensors))
        for part in ("class_counts", "moments", "targets"):
            object.__setattr__(moved, part, _moved(getattr(self, part), found))
        return moved

    def save(self, path: str | Path, mode: int = files.PRIVATE) -> None:
        """Write the file, by default for its owner alone to read; `mode` as of `chmod`."""
        about = headers.Header(
            client=self.client,
            examples=self.examples,
            fingerprint=self.fingerprint,
            statistics=tuple(sorted(self.has)),
            layers=self.layers,
            head=self.head,
            aliases=dict(self.aliases),
            spaces=self.spaces,
            input_shape=None if self.moments is None else self.moments.shape,
            recipe=dict(self.recipe),
        ).about()
        files.write_tensors(Path(path), "upload", self.tensors(), about, mode)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that leaves the client, by the keys of the file."""
        out = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        for kind, part in SPECTRA.items():
            for name, spectrum in getattr(self, part).items():
                out |= _spectrum_tensors(f"{kind}/{name}", spectrum)
        if self.class_counts is not None:
            out["classes"] = self.class_counts
        if self.moments is not None:
            out |= _moments_tensors("moments", self.moments)
        for name, moments in self.features.items():
            out |= _moments_tensors(f"features/{name}", moments)
        if self.targets is not None:
            out["targets"] = self.targets
        return out | {f"fisher/{name}": tensor for name, tensor in self.fisher.items()}

    def bytes(self, only: Collection[str] | None = None) -> int:
        """What its tensors take; with `only`, the weights and of the statistics just these."""
        sizes = {
            "weights": sum(tensor.nbytes for tensor in self.weights.values()),
            **{kind: sum(s.bytes for s in getattr(self, part).values()) for kind, part in SPECTRA.items()},
            "classes": 0 if self.class_counts is None else self.class_counts.nbytes,
            "moments": 0 if self.moments is None else self.moments.bytes,
            "features": sum(moments.bytes for moments in self.features.values()),
            "targets": 0 if self.targets is None else self.targets.nbytes,
            "fisher": sum(tensor.nbytes for tensor in self.fisher.values()),
        }
        return sum(size for part, size in sizes.items() if only is None or part in {"weights", *only})

    @classmethod
    def load(cls, path: str | Path, only: Collection[str] | None = None, limits: files.Limits | None = None) -> Upload:
        """Read a file; with `only`, of the statistics just these. Raises UploadError unless it is a sound upload."""
        kept = set(STATISTICS) if only is None else {"classes", *only}
        with files.opened(Path(path), "upload", limits) as file:
            header = headers.read(file, STATISTICS)
            tensors = file.read_all(lambda name: name.split("/")[0] in kept | {"weights"})
        try:
            upload = cls(
                client=header.client,
                examples=header.examples,
                weights=_read_named("weights", tensors),
                layers=header.layers,
                head=header.head,
                aliases=header.aliases,
                spaces=header.spaces,
                class_counts=tensors.get("classes"),
                moments=_read_moments("moments", tensors, header.input_shape),
                features=_read_features(tensors),
                targets=tensors.get("targets"),
                fisher=_read_named("fisher", tensors),
                **{part: _read_spectra(kind, tensors) for kind, part in SPECTRA.items()},
                recipe=header.recipe,
            )
        except UploadError as error:
            raise UploadError(f"{path}: {error}") from error
        except (KeyError, ValueError) as error:
            raise UploadError(
                f"{path} must be a maecho upload, got parts that do not fit together ({error})"
            ) from error
        for name in sorted(set(header.statistics) & kept - upload.has):
            raise UploadError(f"{path}: {upload.client}'s {name} must be there as the header says, got none")
        return upload


def read_header(path: Path, limits: files.Limits | None = None) -> headers.Header:
    """All that a file says of itself, without reading its tensors."""
    with files.opened(path, "upload", limits) as file:
        return headers.read(file, STATISTICS)


def _moved(part: Any, device: torch.device) -> Any:
    """A tensor, or what is made of tensors, on another device; anything else as it is."""
    if isinstance(part, Tensor | Spectrum):
        return part.to(device=device)
    if isinstance(part, tuple):
        return tuple(_moved(one, device) for one in part)
    if isinstance(part, Moments):
        return replace(part, **{f.name: _moved(getattr(part, f.name), device) for f in fields(part)})
    return part


def _read_named(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(f"{part}/"): t for k, t in tensors.items() if k.startswith(f"{part}/")}


def _spectrum_tensors(key: str, spectrum: Spectrum) -> dict[str, Tensor]:
    parts = {f"{key}/values": spectrum.values}
    return parts if spectrum.basis is None else {**parts, f"{key}/basis": spectrum.basis}


def _read_spectra(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Spectrum]:
    ends = (f"{kind}/", "/values")
    names = [
        k.removeprefix(ends[0]).removesuffix(ends[1]) for k in tensors if k.startswith(ends[0]) and k.endswith(ends[1])
    ]
    return {n: Spectrum(tensors[f"{kind}/{n}/values"], tensors.get(f"{kind}/{n}/basis")) for n in names}


_PARTS = ("/classes", "/counts", "/means", "/covariances/ranks", "/covariances/values", "/covariances/basis")
_RESIDUAL = ("residual", "residual_of_cosines")


def _moments_tensors(key: str, m: Moments) -> dict[str, Tensor]:
    parts = {f"{key}/classes": m.classes, f"{key}/counts": m.counts, f"{key}/means": m.means}
    bases = [covariance.basis[0] for covariance in m.covariances if covariance.basis is not None]
    parts[f"{key}/covariances/ranks"] = torch.tensor(
        [covariance.rank for covariance in m.covariances], device=m.counts.device
    )
    parts[f"{key}/covariances/values"] = torch.cat([covariance.values[0] for covariance in m.covariances])
    parts[f"{key}/covariances/basis"] = torch.cat(bases, 1)
    return parts if m.residual is None else {**parts, f"{key}/{_RESIDUAL[m.in_cosines]}": m.residual}


def _read_moments(key: str, tensors: Mapping[str, Tensor], shape: Sequence[int] | None) -> Moments | None:
    if f"{key}/means" not in tensors or shape is None:
        return None
    return Moments(
        classes=tensors[f"{key}/classes"],
        counts=tensors[f"{key}/counts"],
        means=tensors[f"{key}/means"],
        covariances=_read_covariances(f"{key}/covariances", tensors),
        residual=next((tensors[f"{key}/{name}"] for name in _RESIDUAL if f"{key}/{name}" in tensors), None),
        in_cosines=f"{key}/{_RESIDUAL[True]}" in tensors,
        shape=tuple(shape),
    )


def _read_covariances(key: str, tensors: Mapping[str, Tensor]) -> tuple[Spectrum, ...]:
    counts, values, basis = (tensors[f"{key}/{part}"] for part in ("ranks", "values", "basis"))
    if (counts.dim(), values.dim(), basis.dim()) != (1, 1, 2) or counts.dtype != torch.int64:
        raise ValueError(f"covariances of ranks {list(counts.shape)}, values {list(values.shape)}, {list(basis.shape)}")
    ranks: list[int] = counts.tolist()
    if min(ranks, default=0) < 0 or not sum(ranks) == len(values) == basis.shape[1]:
        raise ValueError(f"covariances of ranks {ranks} with {len(values)} eigenvalues and vectors {list(basis.shape)}")
    pairs = zip(values.split(ranks), basis.split(ranks, 1), strict=True)
    return tuple(Spectrum(s.unsqueeze(0), U.unsqueeze(0).contiguous()) for s, U in pairs)


def _read_features(tensors: Mapping[str, Tensor]) -> dict[str, Moments]:
    found = {}
    names = (key.removeprefix("features/") for key in tensors if key.startswith("features/"))
    for layer in dict.fromkeys(name.removesuffix(part) for name in names for part in _PARTS if name.endswith(part)):
        moments = _read_moments(f"features/{layer}", tensors, list(tensors[f"features/{layer}/means"].shape[1:]))
        assert moments is not None
        found[layer] = moments
    return found
