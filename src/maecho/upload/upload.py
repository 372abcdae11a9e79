"""What one client sends, once, and its file.

An Upload is checked when it is made, whoever makes it. So nothing after this module asks whether its numbers are finite
or its shapes fit.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from maecho import devices
from maecho._version import __version__
from maecho.errors import UploadError
from maecho.network.layers import Layer
from maecho.network.spaces import Place, Space, Spaces
from maecho.statistics import STATISTICS
from maecho.statistics.of_layers import OfLayers
from maecho.upload import checks, storage


@dataclass(frozen=True, eq=False)
class Upload:
    """What one client sends, once: its weights, and what can be said of its data."""

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
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """By their names in STATISTICS; what each value is, its file says."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How each statistic was made, and what else is worth knowing."""

    def __post_init__(self) -> None:
        for name in ("weights", "aliases", "recipe"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        given = dict(self.statistics)
        object.__setattr__(self, "statistics", MappingProxyType(given))  # checks may look at other statistics
        checks.weights(self)
        checked = {name: checks.known(self.client, name).check(value, self) for name, value in given.items()}
        object.__setattr__(self, "statistics", MappingProxyType(checked))
        if self.spaces is not None:
            checks.spaces(self, self.spaces)

    @property
    def has(self) -> frozenset[str]:
        """The statistics that it carries. Where there are no layers, it has all that is said layer by layer."""
        trivial = () if self.layers else (n for n, statistic in STATISTICS.items() if isinstance(statistic, OfLayers))
        return frozenset({*self.statistics, *trivial})

    @property
    def fingerprint(self) -> str:
        """Equal for equal architectures: names, shapes and dtypes of the weights, and how they are read as matrices."""
        return hashlib.sha256(json.dumps(self.architecture(), sort_keys=True).encode()).hexdigest()[:16]

    def architecture(self) -> dict[str, Any]:
        return {
            "weights": {name: _described(tensor) for name, tensor in self.weights.items()},
            "layers": {layer.name: asdict(layer) for layer in self.layers},
            "head": self.head,
            "aliases": dict(self.aliases),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The client's own model."""
        return {**self.weights, **{name: self.weights[kept] for name, kept in self.aliases.items()}}

    def to(self, device: devices.Device) -> Upload:
        """The same upload with every tensor on this device. Checked at birth, its values are not looked at again."""
        found = devices.find(device)
        moved = copy.copy(self)
        weights = {name: tensor.to(device=found) for name, tensor in self.weights.items()}
        statistics = {name: STATISTICS[name].on(value, found) for name, value in self.statistics.items()}
        object.__setattr__(moved, "weights", MappingProxyType(weights))
        object.__setattr__(moved, "statistics", MappingProxyType(statistics))
        return moved

    def save(self, path: str | Path) -> None:
        about = {
            "client": self.client,
            "examples": self.examples,
            "fingerprint": self.fingerprint,
            "statistics": {name: STATISTICS[name].facts(value) for name, value in self.statistics.items()},
            "layers": [asdict(layer) for layer in self.layers],
            "head": self.head,
            "aliases": dict(self.aliases),
            "spaces": None if self.spaces is None else [asdict(space) for space in self.spaces],
            "recipe": dict(self.recipe),
            "made_by": f"maecho {__version__}",
            "tensors": {name: _described(tensor) for name, tensor in self.tensors().items()},
        }
        storage.write_tensors(Path(path), "upload", self.tensors(), about)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that leaves the client, by the keys of the file."""
        out = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        for name, value in self.statistics.items():
            out |= STATISTICS[name].tensors(value)
        return out

    def bytes(self, only: Collection[str] | None = None) -> int:
        """What its tensors take; with `only`, the weights and of the statistics just these."""
        sizes = {n: STATISTICS[n].bytes(value) for n, value in self.statistics.items() if only is None or n in only}
        return sum(tensor.nbytes for tensor in self.weights.values()) + sum(sizes.values())

    @classmethod
    def load(cls, path: str | Path, only: Collection[str] | None = None) -> Upload:
        """Read a file; with `only`, of the statistics just these. Raises UploadError unless it is a sound upload."""
        path = Path(path)
        about = read_header(path)
        kept = None if only is None else {"weights", *only}
        tensors = storage.read_tensors(path, lambda name: kept is None or name.split("/")[0] in kept)
        _check_inventory(path, about, tensors, kept)
        try:
            upload = cls(
                client=about["client"],
                examples=about["examples"],
                weights=_part("weights", tensors, "weights/"),
                layers=tuple(Layer(**layer) for layer in about["layers"]),
                head=about["head"],
                aliases=about["aliases"],
                spaces=_read_spaces(about["spaces"]),
                statistics={
                    name: STATISTICS[name].read(_part(name, tensors), facts)
                    for name, facts in about["statistics"].items()
                    if kept is None or name in kept
                },
                recipe=about["recipe"],
            )
        except UploadError as error:
            raise UploadError(f"{path}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UploadError(
                f"{path} must be a maecho upload, got parts that do not fit together ({error})"
            ) from error
        if upload.fingerprint != about["fingerprint"]:
            raise UploadError(
                f"{path}: {upload.client}'s weights must be of the architecture {about['fingerprint']} that the file "
                f"names, got {upload.fingerprint}"
            )
        return upload


HEADER: dict[str, tuple[type, ...]] = {
    "client": (str,),
    "examples": (int,),
    "fingerprint": (str,),
    "statistics": (dict,),
    "layers": (list,),
    "head": (str, type(None)),
    "aliases": (dict,),
    "spaces": (list, type(None)),
    "recipe": (dict,),
    "tensors": (dict,),
}
"""What the header of a file must say, and as what."""


def read_header(path: Path) -> dict[str, Any]:
    """All that a file says of itself, without reading its tensors."""
    about = storage.read_about(path, "upload")
    for key, kinds in HEADER.items():
        if key not in about:
            raise UploadError(f"{path} must be a maecho upload, got one whose header has no {key!r}")
        if not isinstance(about[key], kinds):
            raise UploadError(f"{path} must be a maecho upload, got one whose header says {key} = {about[key]!r}")
    if not set(about["statistics"]) <= set(STATISTICS):
        raise UploadError(f"{path} must be a maecho upload, got one with the statistics {about['statistics']!r}")
    return about


def _read_spaces(found: list[Any] | None) -> Spaces | None:
    if found is None:
        return None
    return tuple(Space(s["name"], s["size"], tuple(Place(**place) for place in s["places"])) for s in found)


def _described(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _check_inventory(
    path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor], kept: set[str] | None
) -> None:
    """Every tensor that the header lists, and no other: the absence of one could mean something else."""
    listed = {name: d for name, d in about["tensors"].items() if kept is None or name.split("/")[0] in kept}
    for name in listed.keys() | tensors.keys():
        got = _described(tensors[name]) if name in tensors else "none"
        if got != listed.get(name, "none"):
            raise UploadError(
                f"{path}: tensor {name!r} of {about['client']} must be {listed.get(name, 'none')} as the header says, "
                f"got {got}"
            )


def _part(name: str, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of the weights or of one statistic."""
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key == name or key.startswith(f"{name}/")}
