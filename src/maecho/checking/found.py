"""What a check found, as frozen records: findings, layers, stages, sizes, times and methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
Read = Literal["verified", "averaged", "idle", "not tried"]


@dataclass(frozen=True)
class Finding:
    """One sentence: what is wrong or worth knowing, and what to do."""

    level: Level
    """An "error" keeps `make_upload` from making an upload. A "warning" is what it warns of. A "note" is for
    information."""
    text: str


@dataclass(frozen=True)
class LayerFound:
    """One module that has parameters of its own."""

    name: str
    kind: str
    """The name of its class."""
    read: Read
    """"verified": it gave out its matrix times its inputs. "averaged": it is no matrix. "idle": it did not run. "not
    tried": the model did not run."""
    why: str = ""
    """Why it is averaged or was not tried."""
    matrix: tuple[int, int, int] | None = None
    """(groups, outputs, inputs) of its matrix. A bias is one of the inputs, which is always 1."""
    bias: bool = False
    inputs: Literal["", "numbers", "patches", "tokens"] = ""
    """What its rows are."""
    calls: int = 0
    """How often it runs in one pass."""
    shares: tuple[str, ...] = ()
    """Other modules with the same weight."""


@dataclass(frozen=True)
class LabelsFound:
    """The labels of the first batch."""

    examples: int
    classes: Mapping[int, int]
    """Class -> its number of examples."""
    outputs: int | None
    """The number of the model's outputs, if they are one vector for each example."""
    unusable: str = ""
    """Why there are no labels; empty if there are."""


@dataclass(frozen=True)
class SizeFound:
    """The size of one part of the upload, estimated from one batch. `whole` is the most that it can be."""

    part: str
    whole: int
    cut: int


@dataclass(frozen=True)
class TimesFound:
    """Seconds, measured on one batch. They are an estimate: a longer run, another load of the machine differ."""

    forward: float
    """A forward pass over the batch."""
    step: float | None
    """A step of training: forward, backward, update. None if nothing can be trained."""
    statistics: float
    """The pass that gathers the statistics of the batch."""
    once: float
    """What comes after the last batch, however many there are: eigenvalues, the cut, neuron spaces."""
    batches: int | None
    """The number of batches, if it can be known."""

    @property
    def seconds(self) -> float | None:
        """How long an upload takes."""
        return None if self.batches is None else self.batches * self.statistics + self.once

    @property
    def epochs(self) -> float | None:
        """The same in epochs of training."""
        seconds = self.seconds
        return None if seconds is None or not self.step or not self.batches else seconds / (self.batches * self.step)


@dataclass(frozen=True)
class MethodFound:
    """Whether a method can be used, and if not, why."""

    name: str
    usable: bool
    needs: str = ""
    """What it needs besides, or why it cannot be used."""


@dataclass(frozen=True)
class Check:
    """All that `maecho.check` found. `print` shows it."""

    client: str
    findings: tuple[Finding, ...]
    layers: tuple[LayerFound, ...] = ()
    averaged: tuple[str, ...] = ()
    """The weights that belong to no matrix. One-shot methods only average them."""
    labels: LabelsFound | None = None
    stages: tuple[tuple[str, ...], ...] | None = None
    """The units that echo fits together, stage after stage. None if they could not be found."""
    head: str | None = None
    """The layer whose rows are the classes."""
    spaces: Mapping[str, int] | None = None
    """The neurons that can be matched: the first layer of each space -> their number. None if there are none."""
    sizes: tuple[SizeFound, ...] = ()
    rank: str = ""
    """The cut that `sizes` is for."""
    times: TimesFound | None = None
    methods: tuple[MethodFound, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.of("error")

    def of(self, level: Level) -> list[str]:
        """The sentences of one level."""
        return [finding.text for finding in self.findings if finding.level == level]

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain types, for JSON."""
        times = {} if self.times is None else {"seconds": self.times.seconds, "epochs": self.times.epochs}
        found = asdict(self)
        return {"ok": self.ok, **found, "times": None if self.times is None else {**found["times"], **times}}

    def __str__(self) -> str:
        from maecho.checking.words import text  # it reads these records

        return text(self)
