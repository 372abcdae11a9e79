"""The Upload, which one client sends once, and how it is saved and loaded.

An Upload is always checked when it is made. So no later code asks whether its numbers are finite or its shapes fit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from maecho import devices
from maecho.errors import InputError, UploadError
from maecho.formatting import size
from maecho.network.layers import Layer
from maecho.network.packed.storage import Stored, model_state, packed_names, tied
from maecho.network.spaces import Spaces
from maecho.statistics import STATISTICS
from maecho.statistics.of_layers import OfLayers
from maecho.upload import checks, envelope, header, storage


@dataclass(frozen=True, eq=False)
class Upload:
    """The weights of one client, and statistics of its data."""

    client: str
    """The client's name."""
    examples: int
    """The number of its examples."""
    weights: Mapping[str, Tensor]
    """The state_dict, with the matrices of `stored` tensors in their places. A tied tensor stands here once."""
    layers: tuple[Layer, ...] = ()
    """The matrices among the weights, in order of execution."""
    head: str | None = None
    """The layer whose rows are the classes, if there is one."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """A tied name -> the name in `weights`."""
    spaces: Spaces | None = None
    """Which axes are the same neurons. Matching needs them. None if the network could not be traced."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Name in STATISTICS -> value. The statistic's own file says what the value is."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How each statistic was made, for people."""
    stored: tuple[Stored, ...] = ()
    """How tensors of the model's state_dict are made of several weights, or computed from one."""

    def __post_init__(self) -> None:
        for name in ("weights", "aliases", "recipe", "statistics"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        checks.weights(self)
        object.__setattr__(self, "statistics", MappingProxyType(checks.statistics(self)))
        header.check_spaces(self.client, self.weights, self.spaces)

    def __repr__(self) -> str:
        cuts = self.recipe.get("rank", "all")
        return (
            f"Upload of {self.client!r}: {self.examples:,} examples, {len(self.layers)} layers, {self.fingerprint}\n"
            f"  statistics: {', '.join(self.statistics) or 'none'}\n"
            f"  size: {size(self.bytes())}, weights {size(self.bytes(()))} (rank={cuts!r})"
        )

    @property
    def has(self) -> frozenset[str]:
        """The statistics that the upload carries. Without layers it also has all statistics of layers, since these are
        empty."""
        trivial = () if self.layers else (n for n, statistic in STATISTICS.items() if isinstance(statistic, OfLayers))
        return frozenset({*self.statistics, *trivial})

    @property
    def fingerprint(self) -> str:
        """Equal for equal architectures: names, shapes and dtypes of the weights, and how they are read as matrices."""
        return header.fingerprint(self.weights, self.layers, self.head, self.aliases, self.stored)

    def is_like(self, other: Upload) -> bool:
        """Whether the other upload plainly has the same architecture. If not, the fingerprints tell."""
        if (self.head, self.layers) != (other.head, other.layers):
            return False
        if (self.aliases, self.stored) != (other.aliases, other.stored):
            return False
        if self.weights.keys() != other.weights.keys():
            return False
        pairs = [(tensor, other.weights[name]) for name, tensor in self.weights.items()]
        return all(a.dtype is b.dtype and a.shape == b.shape for a, b in pairs)

    def architecture(self) -> dict[str, Any]:
        """All that the fingerprint is computed from."""
        return header.architecture(self.weights, self.layers, self.head, self.aliases, self.stored)

    def state_dict(self) -> dict[str, Tensor]:
        """The client's own model."""
        return self.model_state(self.weights)

    def model_state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state_dict of a model of this architecture, from weights under the names of `weights`."""
        return model_state(weights, self.aliases, self.stored)

    def model_names(self, weights: Iterable[str]) -> list[str]:
        """For names of `weights`, the names in the model's state_dict of what is made of these weights alone."""
        return packed_names(weights, self.weights, self.stored)

    def tied(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights, with tied tensors under all their names."""
        return tied(weights, self.aliases)

    def to(self, device: devices.Device) -> Upload:
        """The same upload with every tensor on this device. It is not checked again, since its values are the same."""
        found = devices.find(device)
        moved = copy.copy(self)
        weights = {name: tensor.to(device=found) for name, tensor in self.weights.items()}
        statistics = {name: STATISTICS[name].on(value, found) for name, value in self.statistics.items()}
        object.__setattr__(moved, "weights", MappingProxyType(weights))
        object.__setattr__(moved, "statistics", MappingProxyType(statistics))
        return moved

    def save(self, path: str | Path, mode: int = storage.PRIVATE) -> None:
        """Write the file. `mode` says who may read it, as for `chmod`; by default only its owner."""
        about = header.Header(
            client=self.client,
            examples=self.examples,
            fingerprint=self.fingerprint,
            statistics={name: STATISTICS[name].facts(value) for name, value in self.statistics.items()},
            layers=self.layers,
            head=self.head,
            aliases=dict(self.aliases),
            spaces=self.spaces,
            recipe=dict(self.recipe),
            stored=self.stored,
        ).about()
        storage.write_tensors(Path(path), "upload", self.tensors(), about, mode)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that leaves the client: key in the file -> tensor."""
        out = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        for name, value in self.statistics.items():
            out |= STATISTICS[name].tensors(value)
        return out

    def bytes(self, only: Collection[str] | None = None) -> int:
        """The size of its tensors. With `only`, that of the weights and of these statistics."""
        sizes = [STATISTICS[n].bytes(value) for n, value in self.statistics.items() if only is None or n in only]
        return sum([tensor.nbytes for tensor in self.weights.values()]) + sum(sizes)

    @classmethod
    def load(
        cls, path: str | Path, only: Collection[str] | None = None, limits: envelope.Limits | None = None
    ) -> Upload:
        """Read a file. Raises UploadError unless it is a sound upload.

        Args:
            path: the path of the file.
            only: names of statistics. Others are not read. Names that the file does not hold are passed over. By
                default all are read.
            limits: the largest size to read. By default the environment sets it.
        """
        return read(Path(path), only, limits)[0]


def read(
    path: Path, only: Collection[str] | None = None, limits: envelope.Limits | None = None
) -> tuple[Upload, header.Header]:
    """Read an upload and its header at once. `only` and `limits` are as for `Upload.load`."""
    _check_names(only)
    with storage.opened(path, "upload", limits) as file:
        about = header.read(file, STATISTICS)
        return of_file(file, about, only), about


def of_file(file: storage.File, about: header.Header, only: Collection[str] | None = None) -> Upload:
    """Read an upload from an open file whose header is known."""
    wanted = [name for name in about.statistics if only is None or name in only]
    tensors = {
        name: file.read_all(lambda key, name=name: key == name or key.startswith(f"{name}/"))  # type: ignore[misc]
        for name in ("weights", *wanted)
    }
    try:
        statistics = {name: _value(name, tensors.pop(name), about) for name in wanted}
        return Upload(
            client=about.client,
            examples=about.examples,
            weights={key.removeprefix("weights/"): tensor for key, tensor in tensors["weights"].items()},
            layers=about.layers,
            head=about.head,
            aliases=about.aliases,
            spaces=about.spaces,
            statistics=statistics,
            recipe=about.recipe,
            stored=about.stored,
        )
    except UploadError as error:
        raise UploadError(f"{file.path}: {error}") from error


def _check_names(only: Collection[str] | None) -> None:
    if isinstance(only, str):
        raise InputError(f"only must be a list of statistics from {', '.join(STATISTICS)}, got the text {only!r}")
    for name in only or ():
        if name not in STATISTICS:
            raise InputError(f"only must name statistics among {', '.join(STATISTICS)}, got {name!r}")


def _value(name: str, tensors: Mapping[str, Tensor], about: header.Header) -> Any:
    try:
        return STATISTICS[name].read(tensors, about.statistics[name])
    except (KeyError, ValueError) as error:
        raise UploadError(f"{about.client}: the parts of {name} must fit together, got others ({error})") from error


def read_header(path: Path, limits: envelope.Limits | None = None) -> header.Header:
    """Read and check the header of an upload's file. Its tensors are not read."""
    return unread(path, limits)[1]


def unread(path: Path, limits: envelope.Limits | None = None) -> tuple[storage.File, header.Header]:
    """The file of an upload and its header. The file is closed; `storage.reopened` opens it again."""
    with storage.opened(path, "upload", limits) as file:
        return file, header.read(file, STATISTICS)
