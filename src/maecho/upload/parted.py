"""An upload of which one tensor, or one part of a statistic, is read at a time.

A method that only sums over clients takes one layer after the other, and of each layer one client after the other. So
it needs the memory of one layer of one upload, however many and however deep the uploads are. Every part is read and
checked anew whenever it is asked for. What nobody asks for is neither read nor checked, but for what the header says of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maecho.errors import UploadError
from maecho.linalg.finite import is_finite
from maecho.network.layers import Layer
from maecho.network.packed.storage import Stored, model_state, packed_names
from maecho.statistics import STATISTICS
from maecho.statistics.statistic import Statistic
from maecho.upload import storage
from maecho.upload.header import Header, listed_weights
from maecho.upload.upload import Upload


class OnDemand(Mapping[str, Any]):
    """A mapping whose values are read whenever they are asked for. It keeps none."""

    def __init__(self, names: Collection[str], read: Callable[[str], Any]):
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, eq=False)
class Parted:
    """The fields of an Upload that methods read. Weights and parts of statistics are read when they are asked for."""

    client: str
    examples: int
    layers: tuple[Layer, ...]
    head: str | None
    aliases: Mapping[str, str]
    stored: tuple[Stored, ...]
    listed: Mapping[str, Tensor]
    """The weights, of which only names, shapes and dtypes may be used: they may have no values."""
    weights: Mapping[str, Tensor]
    statistics: Mapping[str, Any]

    @classmethod
    def of_upload(cls, upload: Upload, device: torch.device | None = None) -> Parted:
        """The parts of an upload in memory. Each is moved to the device when it is asked for."""
        weights, statistics = upload.weights, upload.statistics
        if device is not None:

            def moved(name: str) -> Any:
                statistic, value = STATISTICS[name], upload.statistics[name]
                if not statistic.by_name:
                    return statistic.on(value, device)
                return OnDemand(value, lambda entry: statistic.kind.on(value[entry], device))

            weights = OnDemand(upload.weights, lambda name: upload.weights[name].to(device=device))
            statistics = OnDemand(upload.statistics, moved)
        return cls(*_facts(upload), upload.weights, weights, statistics)

    @classmethod
    def of_file(
        cls, file: storage.File, about: Header, wanted: Collection[str], device: torch.device | None = None
    ) -> Parted:
        """The parts of an upload in a file, of whose statistics those that are wanted can be read."""
        listed = listed_weights(file)
        parts = _Parts(file, about, listed, device)
        weights = OnDemand(listed, parts.weight)
        statistics = OnDemand([name for name in about.statistics if name in wanted], parts.statistic)
        return cls(*_facts(about), listed, weights, statistics)

    def model_state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `Upload.model_state`."""
        return model_state(weights, self.aliases, self.stored)

    def model_names(self, weights: Iterable[str]) -> list[str]:
        """As `Upload.model_names`."""
        return packed_names(weights, self.listed, self.stored)


_Facts = tuple[str, int, tuple[Layer, ...], str | None, Mapping[str, str], tuple[Stored, ...]]


def _facts(of: Upload | Header) -> _Facts:
    """What is known of an upload without reading a tensor: the first fields of `Parted`."""
    return of.client, of.examples, of.layers, of.head, of.aliases, of.stored


def parted(uploads: Sequence[Upload]) -> list[Parted]:
    """The parts of uploads in memory."""
    return [Parted.of_upload(upload) for upload in uploads]


@dataclass(frozen=True)
class _Parts:
    """Reads and checks the parts of one file."""

    file: storage.File
    about: Header
    weights: Mapping[str, Tensor]
    device: torch.device | None
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Empty: no check of a part reads another statistic."""
    _by_name: dict[str, OnDemand] = field(default_factory=dict)

    @property
    def client(self) -> str:
        return self.about.client

    @property
    def examples(self) -> int:
        return self.about.examples

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.about.layers

    @property
    def head(self) -> str | None:
        return self.about.head

    def weight(self, name: str) -> Tensor:
        with storage.reopened(self.file) as file:
            tensor = file.read(f"weights/{name}")
        if not is_finite(tensor):
            raise UploadError(f"{file.path}: {self.client}: weight {name!r} must be finite, got NaN or infinity")
        return tensor if self.device is None else tensor.to(device=self.device)

    def statistic(self, name: str) -> Any:
        """The value of a statistic. If it is a mapping of names, its parts are read when they are asked for."""
        if name in self._by_name:
            return self._by_name[name]
        statistic = STATISTICS[name]
        keys = [key for key in self.file.listing if key == name or key.startswith(f"{name}/")]
        entries = statistic.split(dict.fromkeys(keys, _NOTHING))
        if not statistic.by_name:
            return self._checked(statistic, "", entries[""])
        self._sound(lambda: statistic.check_names(entries.keys(), self))
        self._by_name[name] = OnDemand(entries, lambda entry: self._checked(statistic, entry, entries[entry]))
        return self._by_name[name]

    def _checked(self, statistic: Statistic, entry: str, suffixes: Collection[str]) -> Any:
        """Read and check one part of a statistic."""
        keys = {suffix: "/".join(filter(None, (statistic.name, entry, suffix))) for suffix in suffixes}
        with storage.reopened(self.file) as file:
            tensors = {suffix: file.read(key) for suffix, key in keys.items()}
        facts = self.about.statistics[statistic.name].get(entry, {})

        def check() -> Any:
            try:
                part = statistic.kind.read(tensors, facts)
            except (KeyError, ValueError) as error:
                raise UploadError(
                    f"{self.client}: the parts of {statistic.name} must fit together, got others ({error})"
                ) from error
            return statistic.check_part(entry, part, self)

        part = self._sound(check)
        return part if self.device is None else statistic.kind.on(part, self.device)

    def _sound(self, check: Callable[[], Any]) -> Any:
        try:
            return check()
        except UploadError as error:
            raise UploadError(f"{self.file.path}: {error}") from error


_NOTHING = torch.empty(0)
