"""What a server is: a frozen object with a client half (what it adds to every gradient) and a server half (what it
makes of what the clients return).

State is a flat dictionary of tensors, so that a checkpoint can hold it. Keys of a client's own state begin with its
number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from maecho.rounds.training.local import Correction, Local

Weights = Mapping[str, Tensor]
State = Mapping[str, Tensor]
BATCH = 64
"""Clients read their data for statistics in batches of so many examples, as the projectors of MA-Echo's release do."""


@dataclass(frozen=True)
class Returned:
    """What one client returns: its state_dict after training."""

    client: int
    weights: Weights
    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)

    @property
    def examples(self) -> int:
        return len(self.y)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The client's data, for statistics."""
        return list(zip(self.x.split(BATCH), self.y.split(BATCH), strict=True))


@dataclass(frozen=True)
class Round:
    """What a server half sees."""

    number: int
    """From 1."""
    weights: Weights
    """The global model that the clients started from."""
    returned: Sequence[Returned]
    local: Local
    clients: int
    """How many clients there are in all."""
    trained: frozenset[str]
    """The names of the parameters. What else is among the weights is averaged."""
    network: nn.Module
    """The network, with any weights."""

    def loaded(self, weights: Weights) -> nn.Module:
        """The network with these weights, in evaluation mode."""
        model = copy.deepcopy(self.network)
        model.load_state_dict(dict(weights))
        return model.eval()

    def share(self, one: Returned) -> float:
        return one.examples / sum(other.examples for other in self.returned)

    def mean(
        self, of: Callable[[Returned], Weights], share: Callable[[Returned], float] | None = None
    ) -> dict[str, Tensor]:
        """Σ share · of, entry by entry, in float64 and then in the entries' own precision."""
        share = share or self.share
        total: dict[str, Tensor] = {}
        for one in self.returned:
            for name, tensor in of(one).items():
                if name not in total:
                    total[name] = torch.zeros_like(tensor, dtype=torch.float64)
                total[name].add_(tensor, alpha=share(one))
        return {name: tensor.to(self.weights[name].dtype) for name, tensor in total.items()}

    def average(self) -> dict[str, Tensor]:
        """Σ p_i w_i."""
        return self.mean(lambda one: one.weights)

    def moved(self, one: Returned) -> dict[str, Tensor]:
        """Δ_i of the parameters."""
        return {name: self.weights[name] - one.weights[name] for name in self.trained}


@dataclass(frozen=True)
class Outcome:
    """What a server half returns."""

    weights: Weights
    """The next global model."""
    state: State
    bytes: int
    """What the client uploaded that uploaded the most."""


class Server(Protocol):
    """Both halves of a method of many rounds."""

    def correction(self, weights: Weights, state: State, client: int) -> Correction:
        """The client half."""

    def __call__(self, round_: Round, state: State) -> Outcome:
        """The server half."""


class NoCorrection:
    """The client half of servers that leave local training as it is."""

    def correction(self, weights: Weights, state: State, client: int) -> Correction:
        return Correction()


def size(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
