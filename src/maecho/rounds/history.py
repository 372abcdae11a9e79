"""What happened in a run of many rounds, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from maecho.errors import InputError


@dataclass(frozen=True)
class RoundRecord:
    """One round."""

    number: int
    """From 1."""
    sampled: tuple[int, ...]
    """The clients that were asked."""
    left_out: Mapping[int, str]
    """Client -> why it does not count in this round."""
    accuracy: float
    """Of the global model after the round, in [0, 1]."""
    bytes: int
    """What the client uploaded that uploaded the most."""
    training: float
    """Seconds of local training, of all clients of the round together."""
    merging: float
    """Seconds of the server, and of what clients compute for it."""
    evaluating: float
    norms: Mapping[str, float]
    """Parameter -> its Frobenius norm in the global model."""

    @property
    def seconds(self) -> float:
        return self.training + self.merging + self.evaluating


@dataclass(frozen=True)
class History:
    """A whole run."""

    weights: Mapping[str, Tensor]
    """The last global model."""
    records: tuple[RoundRecord, ...]

    @property
    def accuracies(self) -> list[float]:
        return [record.accuracy for record in self.records]

    def mean(self, first: int, last: int) -> float:
        """The mean accuracy over these rounds, both counted from 1."""
        return statistics.fmean(self.accuracies[first - 1 : last])

    def rounds_to(self, accuracy: float) -> int | None:
        """The first round after which the global model is at least as accurate; None: no round."""
        return next((record.number for record in self.records if record.accuracy >= accuracy), None)

    def bytes_to(self, accuracy: float) -> int | None:
        """What a client that takes part in every round has uploaded by then."""
        last = self.rounds_to(accuracy)
        return None if last is None else sum(record.bytes for record in self.records[:last])


class DivergedError(InputError):
    """Training or merging ended in NaN or infinity. `history` has the rounds before."""

    def __init__(self, message: str, history: History) -> None:
        super().__init__(message)
        self.history = history
