"""The base class of every statistic. It holds all that the rest of the library does with one.

To add a statistic, write a file with a `Gatherer` and a `Statistic`, and add a row to STATISTICS. Then it can be
uploaded, read, checked, cut, moved and printed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from maecho.errors import InputError
from maecho.linalg.gaussians import COVARIANCES, Covariance
from maecho.linalg.spectra import Spectrum
from maecho.network.batches.reading import Read, Reader
from maecho.network.directions import LABELS, Labels
from maecho.network.forward import Pass
from maecho.network.hooks import Watch
from maecho.network.layers import Architecture, Layer
from maecho.network.spaces import Move
from maecho.options import number, one_of
from maecho.privacy import NoisySums
from maecho.statistics import parts
from maecho.statistics.parts import Kind, Value

LEAST = 16
"""The fewest directions of a matrix that are computed."""


class NotGathered(Exception):  # noqa: N818 (not an error: the upload is made without the statistic)
    """Raised by a Gatherer that has no value. The message is the reason; the recipe of the upload holds it."""


@dataclass(frozen=True)
class Options:
    """The options of gathering. `make_upload` explains them."""

    labels: Labels = "expected"
    generator: torch.Generator | None = None
    gaussians: int = 1
    covariance: Covariance = "class"
    mean_of: int | None = None
    examples: int | None = None
    """How many examples there were, once that is known. Only the recipe asks."""

    def __post_init__(self) -> None:
        one_of("labels", self.labels, LABELS)
        if self.labels == "sampled" and self.generator is None:
            raise InputError("labels='sampled' must come with a generator, got none")
        number("gaussians", self.gaussians, "a whole number, at least 1", 1, whole=True)
        one_of("covariance", self.covariance, COVARIANCES)
        if self.mean_of is not None:
            number("mean_of", self.mean_of, "a whole number, at least 1", 1, whole=True)


@dataclass(frozen=True)
class Setting:
    """All that a Gatherer knows before the pass."""

    client: str
    model: nn.Module
    architecture: Architecture
    options: Options = field(default_factory=Options)
    watch: Watch = field(default_factory=Watch)
    """The watch of the pass. A Gatherer that runs the model for its own purposes pauses it meanwhile."""
    room: float | None = None
    """See `Found`."""
    reader: Reader | None = None
    """Finds inputs and labels in a batch. By default a new one does, with the usual rules."""

    @property
    def outputs(self) -> Read | None:
        """The user's function that finds the scores in what the model returns."""
        return None if self.reader is None else self.reader.reading.outputs


@dataclass(frozen=True)
class Found:
    """All that is known after the pass, whatever statistics were gathered."""

    examples: int
    layers: tuple[Layer, ...]
    """In order of execution. Layers that never ran come last."""
    head: str | None
    """The layer whose rows are the classes, if there is one."""
    outputs: int | None
    """The length of the model's output for one example, if the output is a vector."""
    weights: Mapping[str, Tensor]
    room: float | None = None
    """How many bytes of directions each statistic may need. Further directions need not be computed. None: all are
    wanted."""

    def enough(self, widths: Iterable[int]) -> int | None:
        """How many directions of each matrix are wanted, for a statistic with matrices of these widths."""
        if self.room is None:
            return None
        return max(LEAST, int(self.room / max(1, sum(8 + 4 * width for width in widths))))


class Gatherer(ABC):
    """Adds up one statistic during one pass over the data."""

    def expect(self, examples: int) -> None:  # noqa: B027 (most do not ask)
        """Called before every batch, with the number of its examples."""

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:  # noqa: B027 (most look only at batches)
        """Called whenever a layer runs, with the layer's input x."""

    def add(self, step: Pass) -> None:  # noqa: B027 (some look only at layers)
        """Called after every batch."""

    @abstractmethod
    def value(self, found: Found) -> Value:
        """The statistic, after the pass. Raises NotGathered if there is no value.

        It may be asked for again, with more directions.
        """


class Carrier(Protocol):
    """The parts of an upload that a check of one of its statistics may read."""

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
    """One kind of information that a client can send about its data."""

    name: ClassVar[str]
    reveals: ClassVar[str]
    """What it can reveal about the data, in plain words."""
    kind: ClassVar[Kind] = parts.TENSORS
    """What its parts are: TENSORS, COUNTS, MATRICES, PROJECTORS or GAUSSIANS (see parts.py), or a kind of its own."""
    by_name: ClassVar[bool] = False
    """Whether the value is a mapping of names to parts. If not, it is a single part."""
    by_default: ClassVar[bool] = False
    """Whether it is sent if the client does not name any statistics."""
    additive: ClassVar[bool] = False
    """Whether the value for two data sets together is the sum (`plus`) of their values, as long as nothing is cut."""
    of_inputs: ClassVar[bool] = False
    """Whether its value is Gaussians of the raw inputs. Then inputs like the client's can be drawn from it."""
    private: ClassVar[bool] = False
    """Whether it can be sent with noise. Then `of_noisy` makes it."""

    @abstractmethod
    def gatherer(self, setting: Setting) -> Gatherer:
        """A new Gatherer that adds the statistic up during one pass."""

    @abstractmethod
    def recipe(self, options: Options) -> str:
        """How the statistic is made, in words for the recipe of the upload."""

    def of_noisy(self, sums: NoisySums) -> Value:
        """The statistic, computed from sums with noise. Raises NotGathered if there is no value."""
        raise TypeError(f"{self.name} cannot be sent with noise")

    def check(self, value: Any, carrier: Carrier) -> Any:
        """The value in the form that an upload holds. Raises UploadError, with the client's name, if it is unsound."""
        return value

    def check_names(self, names: Collection[str], carrier: Carrier) -> None:
        """Raise UploadError unless a mapping may have parts of these names, and must have no others. A statistic with
        `by_name` whose parts are read one at a time has this check and the next, and builds `check` from both."""
        raise TypeError(f"{self.name} must be read as a whole")

    def check_part(self, name: str, part: Any, carrier: Carrier) -> Any:
        """The part of this name in the form that an upload holds. Raises UploadError if it is unsound."""
        if self.by_name:
            raise TypeError(f"{self.name} must be read as a whole")
        return self.check(part, carrier)

    def warnings(self, value: Any, carrier: Carrier) -> list[str]:
        """Sentences that the sender should read before sending."""
        return []

    def moved(self, value: Any, carrier: Carrier, move: Move) -> Any:
        """The value after a move has permuted or mixed the neurons of one space."""
        return value

    def tensors(self, value: Value) -> dict[str, Tensor]:
        """Everything that leaves the client: key in the file -> tensor."""
        return {
            "/".join(filter(None, (self.name, entry, suffix))): tensor
            for entry, part in parts.entries(value).items()
            for suffix, tensor in self.kind.tensors(part).items()
        }

    def facts(self, value: Value) -> dict[str, dict[str, tuple[int, ...]]]:
        """What the header says about the value: entry -> shapes by name. Shapes are public."""
        found = {entry: self.kind.facts(part) for entry, part in parts.entries(value).items()}
        return {entry: facts for entry, facts in found.items() if facts}

    def read(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Mapping[str, Any]]) -> Value:
        """The inverse of `tensors` and `facts`. Raises ValueError or KeyError if the parts do not fit together."""
        value = {entry: self.kind.read(part, facts.get(entry, {})) for entry, part in self.split(tensors).items()}
        return value if self.by_name else value[""]

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The tensors of each entry (a layer, a weight): entry -> suffix -> tensor. Raises ValueError for a tensor that
        belongs to none."""
        found: dict[str, dict[str, Tensor]] = {}
        suffixes = sorted(self.kind.suffixes, key=len, reverse=True)
        for key, tensor in tensors.items():
            rest = key.removeprefix(self.name)
            suffix = next((one for one in suffixes if one and rest.endswith(f"/{one}")), "")
            entry = (rest.removesuffix(f"/{suffix}") if suffix else rest).removeprefix("/")
            part = found.setdefault(entry, {})
            if (not suffix and "" not in suffixes) or (entry and not self.by_name) or suffix in part:
                besides = rest.removeprefix("/")
                raise ValueError(f"{self.name} must hold tensors that maecho reads, got {besides!r} besides")
            part[suffix] = tensor
        return found

    def complaint(self, listed: Mapping[str, Mapping[str, Tensor]]) -> str | None:
        """A sentence that says what is wrong with the dtypes and shapes of the tensors of its entries; None if nothing
        is. They have no values, since they were not read yet."""
        for entry, part in listed.items():
            wrong = self.kind.complaint(part)
            if wrong:
                return f"{self.name}{f' of {entry!r}' if entry else ''} must {wrong}"
        return None

    def bytes(self, value: Value) -> int:
        """The size of the value's tensors."""
        return sum(map(self.kind.size, parts.entries(value).values()))

    def on(self, value: Value, device: torch.device) -> Value:
        """The value on another device."""
        return parts.each(value, lambda part: self.kind.on(part, device))

    def at(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another floating-point dtype."""
        return parts.each(value, lambda part: self.kind.at(part, dtype))

    def spectra(self, value: Value) -> list[Spectrum]:
        """The matrices that can be cut. If they must fit a size, they all keep the same share of energy."""
        return [spectrum for part in parts.entries(value).values() for spectrum in self.kind.spectra(part)]

    def residual_bytes(self, value: Value) -> int:
        """How many bytes `cut` adds if it keeps variances."""
        return sum(map(self.kind.residual_bytes, parts.entries(value).values()))

    def cut(self, value: Value, rank: Callable[[Spectrum], int], keep_variances: bool = True) -> Value:
        """Keep only the leading directions of every matrix."""
        return parts.each(value, lambda part: self.kind.cut(part, rank, keep_variances))

    def ranks(self, value: Value) -> dict[str, int]:
        """Beginning of the keys in the file -> how many directions the tensors with it hold."""
        return {
            "/".join(filter(None, (self.name, entry, prefix))): rank
            for entry, part in parts.entries(value).items()
            for prefix, rank in self.kind.ranks(part).items()
        }

    def plus(self, one: Value, other: Value) -> Value:
        """The value for both data sets together. The statistic must be additive."""
        if not self.additive:
            raise TypeError(f"{self.name} must be additive for its values to be added, got one that is not")
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            return self.kind.plus(one, other)
        return {
            name: self.kind.plus(one[name], other[name]) if name in one and name in other else {**one, **other}[name]
            for name in {**one, **other}
        }
