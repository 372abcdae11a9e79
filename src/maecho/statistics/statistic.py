"""What every statistic is: one object with all that the rest of the library does with it.

To add one, write a file with a `Gatherer` and a `Statistic`, and add a row to STATISTICS. Uploading, reading, checking,
cutting, moving and printing follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from maecho.errors import InputError
from maecho.linalg.gaussians import COVARIANCES, Covariance
from maecho.linalg.spectra import Spectrum
from maecho.network.directions import LABELS, Labels
from maecho.network.forward import Pass
from maecho.network.hooks import Watch
from maecho.network.layers import Architecture, Layer
from maecho.network.spaces import Move
from maecho.privacy import NoisySums
from maecho.statistics import parts
from maecho.statistics.parts import Value


class NotGathered(Exception):  # noqa: N818 (no error: the upload goes without)
    """Raised by a Gatherer that has no value; the message is the reason, for the recipe of the upload."""


@dataclass(frozen=True)
class Options:
    """How statistics are gathered, where there is a choice; see `make_upload`."""

    labels: Labels = "expected"
    generator: torch.Generator | None = None
    gaussians: int = 1
    covariance: Covariance = "class"

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise InputError(f"labels must be one of {', '.join(LABELS)}, got {self.labels!r}")
        if self.labels == "sampled" and self.generator is None:
            raise InputError("labels='sampled' must come with a generator, got none")
        if isinstance(self.gaussians, bool) or not isinstance(self.gaussians, int) or self.gaussians < 1:
            raise InputError(f"gaussians must be a whole number from 1 on, got {self.gaussians!r}")
        if self.covariance not in COVARIANCES:
            raise InputError(f"covariance must be one of {', '.join(COVARIANCES)}, got {self.covariance!r}")


@dataclass(frozen=True)
class Setting:
    """What a Gatherer knows before the pass."""

    client: str
    model: nn.Module
    architecture: Architecture
    options: Options = field(default_factory=Options)
    watch: Watch = field(default_factory=Watch)
    """Of the pass: who runs the model for a purpose of its own pauses it."""


@dataclass(frozen=True)
class Found:
    """What is known after the pass, whatever was gathered."""

    examples: int
    layers: tuple[Layer, ...]
    """In order of execution; those that never ran come last."""
    head: str | None
    """The layer whose rows are the classes."""
    outputs: int | None
    """Length of the model's output for one example, where that is a vector."""
    weights: Mapping[str, Tensor]


class Gatherer(ABC):
    """Adds up one statistic during one pass over the data."""

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:  # noqa: B027 (most look at batches alone)
        """Called whenever a layer runs, with what enters it."""

    def add(self, step: Pass) -> None:  # noqa: B027 (some look at layers alone)
        """Called after every batch."""

    @abstractmethod
    def value(self, found: Found) -> Value:
        """The statistic, after the pass. Raises NotGathered where there is none."""


class Carrier(Protocol):
    """What a check may ask of the upload that carries a statistic."""

    @property
    def client(self) -> str: ...
    @property
    def examples(self) -> int: ...
    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def layers(self) -> tuple[Layer, ...]: ...
    @property
    def head(self) -> str | None: ...
    @property
    def statistics(self) -> Mapping[str, Any]: ...


class Statistic(ABC):
    """One thing that a client can say of its data."""

    name: ClassVar[str]
    reveals: ClassVar[str]
    """In plain words, what it can reveal about the data."""
    kind: ClassVar[type] = Tensor
    """Of its parts: Tensor, Spectrum (a `Diagonal` is one too) or Gaussians."""
    by_name: ClassVar[bool] = False
    """Whether the value is a mapping of names to parts."""
    by_default: ClassVar[bool] = False
    """Whether it is sent unless the client asks for others."""
    additive: ClassVar[bool] = False
    """Whether the value of two data sets together is the sum (`plus`) of their values, as long as nothing is cut."""
    private: ClassVar[bool] = False
    """Whether it can be sent with noise; then `of_noisy` makes it."""

    @abstractmethod
    def gatherer(self, setting: Setting) -> Gatherer:
        """What adds it up during the pass."""

    @abstractmethod
    def recipe(self, options: Options) -> str:
        """How it was made, for the recipe of the upload."""

    def of_noisy(self, sums: NoisySums) -> Value:
        """The statistic, made of sums that hold noise. Raises NotGathered where there is none."""
        raise NotImplementedError(f"{self.name} cannot be sent with noise")

    def check(self, value: Any, carrier: Carrier) -> Any:
        """The value as an upload holds it. Raises UploadError, with the client's name, where it is unsound."""
        return value

    def warnings(self, value: Any, carrier: Carrier) -> list[str]:
        """What the sender should think about first."""
        return []

    def moved(self, value: Any, carrier: Carrier, move: Move) -> Any:
        """The value after the neurons of one space were carried over."""
        return value

    def tensors(self, value: Value) -> dict[str, Tensor]:
        """Everything that leaves the client, by its keys in the file."""
        return {
            "/".join(filter(None, (self.name, entry, suffix))): tensor
            for entry, part in parts.entries(value).items()
            for suffix, tensor in parts.tensors(part).items()
        }

    def facts(self, value: Value) -> dict[str, dict[str, tuple[int, ...]]]:
        """What the header says of it, entry by entry: shapes, which are public."""
        found = {entry: parts.facts(part) for entry, part in parts.entries(value).items()}
        return {entry: facts for entry, facts in found.items() if facts}

    def read(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Mapping[str, Any]]) -> Value:
        """The inverse of `tensors` and `facts`. Raises ValueError or KeyError where the parts do not fit together."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            entry, suffix = self._split(key)
            found.setdefault(entry, {})[suffix] = tensor
        value = {entry: parts.read(self.kind, part, facts.get(entry, {})) for entry, part in found.items()}
        return value if self.by_name else value[""]

    def _split(self, key: str) -> tuple[str, str]:
        """The name of the entry, and that of the tensor within it."""
        for suffix in parts.SUFFIXES[self.kind]:
            if key.endswith(f"/{suffix}") or not suffix:
                rest = key.removesuffix(f"/{suffix}") if suffix else key
                return rest.removeprefix(self.name).removeprefix("/"), suffix
        raise ValueError(f"{key!r} is no tensor of {self.name}")

    def bytes(self, value: Value) -> int:
        return sum(map(parts.size, parts.entries(value).values()))

    def on(self, value: Value, device: torch.device) -> Value:
        return parts.each(value, lambda part: parts.on(part, device))

    def at(self, value: Value, dtype: torch.dtype) -> Value:
        """With real numbers in another dtype."""
        return parts.each(value, lambda part: parts.at(part, dtype))

    def spectra(self, value: Value) -> list[Spectrum]:
        """The matrices that can be cut down. Their energies are compared with each other."""
        return [spectrum for part in parts.entries(value).values() for spectrum in parts.spectra(part)]

    def residual_bytes(self, value: Value) -> int:
        """What `cut` adds where it keeps variances."""
        return sum(map(parts.residual_bytes, parts.entries(value).values()))

    def cut(self, value: Value, rank: Callable[[Spectrum], int], keep_variances: bool = True) -> Value:
        """The leading directions of every matrix alone."""
        return parts.each(value, lambda part: parts.cut(part, rank, keep_variances))

    def ranks(self, value: Value) -> dict[str, int]:
        """Directions kept, by the beginning of the keys of the tensors that hold them."""
        return {
            "/".join(filter(None, (self.name, entry, prefix))): rank
            for entry, part in parts.entries(value).items()
            for prefix, rank in parts.ranks(part).items()
        }

    def plus(self, one: Value, other: Value) -> Value:
        """The value of both data sets together, of an additive statistic."""
        if not self.additive:
            raise TypeError(f"{self.name} is not additive: what two clients say of it cannot be added")
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            return parts.plus(parts.entries(one)[""], parts.entries(other)[""])
        return {
            name: parts.plus(one[name], other[name]) if name in one and name in other else {**one, **other}[name]
            for name in {**one, **other}
        }
