"""The messages of a relay: the server sends a Question to every client, and each sends an Answer back.

Answers add up: the answer of two clients together is the sum of their answers. Addition is that of the wire forms (see
wire.py), key by key. So secure aggregation, which sums wire forms without reading any of them, gives the server the
same total.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maecho.echo import wire
from maecho.echo.totals import REQUIRED, UnitTotals, real_numbers
from maecho.errors import InputError
from maecho.formatting import numbers
from maecho.network.units import Unit
from maecho.options import number

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Question:
    """Asks every client for the sums of one stage.

    Args:
        round: how many stages are fitted. Only people read it.
        opening: whether this is the first question. A client then says how the network runs, and sends the sums of the
            first stage. Nothing else is asked.
        units: layer -> the BatchNorm that is fitted together with it, or None.
        head: the last layer if its rows are the classes, else None.
        weights: the merged weights so far.
    """

    round: int = 0
    opening: bool = False
    units: Mapping[str, str | None] = field(default_factory=dict)
    head: str | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _freeze(self, "a question", "units", "weights")
        number("the round of a question", self.round, "a whole number, at least 0", 0, whole=True)
        if not isinstance(self.opening, bool):
            raise InputError(f"opening of a question must be True or False, got {self.opening!r}")
        _check_layers(self.units, {name: norm for name, norm in self.units.items() if norm is not None}, self.head)
        for name, tensor in self.weights.items():
            if not isinstance(tensor, Tensor):
                raise InputError(f"the weight {name!r} of a question must be a tensor, got {type(tensor).__name__}")
        if self.opening and (self.units or self.weights or self.head is not None):
            raise InputError("an opening question must ask for nothing else, got layers or weights besides")

    def tensors(self) -> dict[str, Tensor]:
        """Its wire form."""
        out = {wire.ROUND: torch.tensor(self.round)}
        if self.opening:
            out[wire.OPEN] = wire.mark()
        for name, norm in self.units.items():
            out[f"{wire.UNIT}{name}"] = wire.mark()
            if norm is not None:
                out[f"{wire.JOIN}{name}/{norm}"] = wire.mark()
        if self.head is not None:
            out[f"{wire.HEAD}{self.head}"] = wire.mark()
        return out | {f"{wire.WEIGHTS}{name}": tensor for name, tensor in self.weights.items()}

    @classmethod
    def read(cls, message: Question | Mapping[str, Tensor]) -> Question:
        """Read a question from its wire form. A Question is returned as it is."""
        if isinstance(message, Question):
            return message
        wire.check_tensors(message, "a question")
        names = wire.below(wire.UNIT, message)
        joined = wire.joins(message, names)
        question = cls(
            wire.whole_number(wire.ROUND, message[wire.ROUND]) if wire.ROUND in message else 0,
            wire.OPEN in message,
            {name: joined.get(name) for name in names},
            wire.head(message),
            wire.below(wire.WEIGHTS, message),
        )
        wire.check_keys(message, question.tensors(), "a question")
        return question

    def __reduce__(self) -> tuple[Any, ...]:
        return Question.read, (self.tensors(),)


@dataclass(frozen=True, eq=False)
class Opening:
    """The part that only the first answer has: how the network runs, and the weights that no sum is taken of."""

    stages: Mapping[str, int] = field(default_factory=dict)
    """Layer -> the number of its stage, in order of execution."""
    joins: Mapping[str, str] = field(default_factory=dict)
    """Layer -> the BatchNorm that is fitted together with it."""
    head: str | None = None
    """The last layer, whose rows are the classes, if there is one."""
    plain: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights that belong to no unit: real numbers times the client's examples, and counters."""

    def __post_init__(self) -> None:
        _freeze(self, "an opening", "stages", "joins", "plain")
        for name, stage in self.stages.items():
            number(f"the stage of {name!r}", stage, "a whole number, at least 0", 0, whole=True)
        numbers = {0, *self.stages.values()}  # the first stage may be empty
        if len(numbers) <= max(numbers):
            raise InputError(f"answers must number the stages without a gap, got {sorted(set(self.stages.values()))}")
        for layer in self.joins:
            if layer not in self.stages:
                raise InputError(f"a BatchNorm must be joined to a layer that has a stage, got {layer!r}")
        _check_layers(self.stages, self.joins, self.head)
        if self.head is not None and self.head not in self.stages:
            raise InputError(f"the last layer must have a stage, got {self.head!r}, which has none")
        plain = {name: _weight(f"the weight {name!r}", tensor) for name, tensor in self.plain.items()}
        object.__setattr__(self, "plain", MappingProxyType(plain))

    def tensors(self) -> dict[str, Tensor]:
        """Its part of the wire form."""
        out = {f"{wire.STAGE}{name}": torch.tensor(stage) for name, stage in self.stages.items()}
        out |= {f"{wire.JOIN}{layer}/{norm}": wire.mark() for layer, norm in self.joins.items()}
        if self.head is not None:
            out[f"{wire.HEAD}{self.head}"] = wire.mark()
        return out | {f"{wire.PLAIN}{name}": tensor for name, tensor in self.plain.items()}

    @classmethod
    def read(cls, message: Mapping[str, Tensor]) -> Opening | None:
        """Read this part of an answer's wire form. None if the answer has none."""
        stages = {
            name: wire.whole_number(f"{wire.STAGE}{name}", tensor)
            for name, tensor in wire.below(wire.STAGE, message).items()
        }
        found = cls(stages, wire.joins(message, stages), wire.head(message), wire.below(wire.PLAIN, message))
        return found if found.tensors() else None


@dataclass(frozen=True, eq=False)
class Answer:
    """Answers a question for one client, or for many, as the sum of their answers.

    The law of `+`: the answer of two clients together is the sum of their answers, and so are the wire forms.

    Args:
        clients: the number of clients whose answers are added up here. It is a real number, so that secure aggregation
            can mask it.
        examples: the number of examples of these clients, as a real number for the same reason.
        totals: the sums of every unit that was asked for.
        opening: the part that only the first answer has.
    """

    clients: Float[Tensor, ""]
    examples: Float[Tensor, ""]
    totals: tuple[UnitTotals, ...] = ()
    opening: Opening | None = None

    def __post_init__(self) -> None:
        for part in (wire.CLIENTS, wire.EXAMPLES):
            tensor = real_numbers(part, getattr(self, part))
            if tensor.numel() != 1:
                raise InputError(f"answers must say of how many {part} they are, got {numbers(tensor)}")
            object.__setattr__(self, part, tensor)
        if self.opening is not None and not isinstance(self.opening, Opening):
            raise InputError(f"the opening of an answer must be an Opening, got {type(self.opening).__name__}")
        if not isinstance(self.totals, Iterable):
            raise InputError(f"the sums of an answer must be a sequence, got {type(self.totals).__name__}")
        object.__setattr__(self, "totals", tuple(self.totals))
        for totals in self.totals:
            if not isinstance(totals, UnitTotals):
                raise InputError(f"the sums of an answer must be UnitTotals, got {type(totals).__name__}")
        names = [totals.unit for totals in self.totals]
        if len(set(names)) < len(names):
            raise InputError(f"an answer must hold the sums of a layer once, got {', '.join(map(repr, names))}")

    def __add__(self, other: Answer) -> Answer:
        return Answer.read(wire.add(self.tensors(), other.tensors()))

    def of(self, unit: str) -> UnitTotals:
        """The sums of one unit."""
        found = next((totals for totals in self.totals if totals.unit == unit), None)
        if found is None:
            raise InputError(f"answers must hold the sums of {unit!r}, got none")
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Its wire form."""
        out = {wire.CLIENTS: self.clients, wire.EXAMPLES: self.examples}
        if self.opening is not None:
            out |= self.opening.tensors()
        for totals in self.totals:
            out |= {f"{wire.SUM}{totals.unit}/{part}": tensor for part, tensor in totals.parts().items()}
        return out

    @classmethod
    def read(cls, message: Answer | Mapping[str, Tensor]) -> Answer:
        """Read an answer from its wire form. An Answer is returned as it is."""
        if isinstance(message, Answer):
            return message
        wire.check_tensors(message, "an answer")
        for part in (wire.CLIENTS, wire.EXAMPLES):
            if part not in message:
                raise InputError(f"answers must say of how many {part} they are, got none")
        sums: dict[str, dict[str, Tensor]] = {}
        for key, tensor in wire.below(wire.SUM, message).items():
            unit, _, part = key.rpartition("/")
            sums.setdefault(unit, {})[part] = tensor
        known = {f.name for f in fields(UnitTotals)} - {"unit"}
        totals = []
        for unit, parts in sums.items():
            if not parts.keys() >= set(REQUIRED):
                raise InputError(f"answers must hold the sums of {unit!r}, got none")
            totals.append(UnitTotals(unit, **{part: tensor for part, tensor in parts.items() if part in known}))
        answer = cls(message[wire.CLIENTS], message[wire.EXAMPLES], tuple(totals), Opening.read(message))
        wire.check_keys(message, answer.tensors(), "an answer")
        return answer

    def __reduce__(self) -> tuple[Any, ...]:
        return Answer.read, (self.tensors(),)


def add_up(answers: Iterable[Answer | Mapping[str, Tensor]]) -> tuple[Answer | None, int]:
    """The sum of all answers, and the size in bytes of the largest. Each is added when it comes."""
    total, largest = None, 0
    for i, message in enumerate(answers):
        try:
            answer = Answer.read(message)
            total = answer if total is None else total + answer
        except InputError as error:
            raise InputError(f"answer {i}: {error}") from error
        sent = message.tensors() if isinstance(message, Answer) else message
        largest = max(largest, sum(tensor.nbytes for tensor in sent.values()))
    return total, largest


def units_named(names: Mapping[str, str | None], units: Mapping[str, Unit]) -> tuple[Unit, ...]:
    """Find in a network the units that a message names. Each is joined with the BatchNorm that the message names for
    it."""
    for wanted in (*names, *(norm for norm in names.values() if norm is not None)):
        if wanted not in units:
            raise InputError(f"sums must be of layers of this network, got {wanted!r}, which it does not have")
    return tuple(replace(units[name], norm=norm) for name, norm in names.items())


def _freeze(message: Question | Opening, what: str, *parts: str) -> None:
    """Make these parts mappings that nobody can change. Raises InputError unless their keys are names."""
    for part in parts:
        mapping = getattr(message, part)
        if not isinstance(mapping, Mapping):
            raise InputError(f"{part} of {what} must be a mapping, got {type(mapping).__name__}")
        for name in mapping:
            if not isinstance(name, str):
                raise InputError(f"{part} of {what} must have names as keys, got {type(name).__name__}")
        object.__setattr__(message, part, MappingProxyType(dict(mapping)))


def _check_layers(layers: Collection[str], joins: Mapping[str, str], head: str | None) -> None:
    """Raise InputError unless the last layer is a name, and each BatchNorm belongs to one layer alone."""
    if head is not None and not isinstance(head, str):
        raise InputError(f"the last layer must be a name, got {type(head).__name__}")
    seen: set[str] = set()
    for layer, norm in joins.items():
        if not isinstance(norm, str):
            raise InputError(f"the BatchNorm of {layer!r} must be a name, got {type(norm).__name__}")
        if norm in layers or norm in seen:
            raise InputError(
                f"a BatchNorm must be fitted with one layer alone, got {norm!r} at {layer!r} and elsewhere"
            )
        seen.add(norm)


def _weight(what: str, tensor: Tensor) -> Tensor:
    """A weight that no sum is taken of: finite real numbers in float64, or a counter."""
    counter = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    return tensor if counter else real_numbers(what, tensor)
