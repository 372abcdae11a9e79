"""Local training of one round: settings, the order of examples, and what a server may add to every gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.options import POSITIVE, number
from maecho.rounds.training.losses import CrossEntropy, Loss
from maecho.rounds.training.sphere import Sphere

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True)
class Local:
    """SGD with momentum, in shuffled batches."""

    epochs: int = 10
    learning_rate: float = 0.01
    momentum: float = 0.5
    batch_size: int = 64
    clip: float | None = None
    """The largest norm of one step's gradient, over all parameters together; None: any."""
    loss: Loss = field(default_factory=CrossEntropy)
    sphere: Sphere | None = None
    """A last layer that is fixed while clients train, and solved for in closed form after every round; None: it is
    trained like the others."""

    def __post_init__(self) -> None:
        number("epochs", self.epochs, "a whole number, at least 1", 1, whole=True)
        number("learning_rate", self.learning_rate, POSITIVE, 0)
        number("batch_size", self.batch_size, "a whole number, at least 1", 1, whole=True)
        number("momentum", self.momentum, "at least 0 and below 1", 0, 1 - 1e-9)
        if self.clip is not None:
            number("clip", self.clip, POSITIVE, 0)

    def steps(self, examples: int) -> int:
        """How many steps a client with so many examples takes."""
        return self.epochs * math.ceil(examples / self.batch_size)

    def effective_steps(self, examples: int) -> float:
        """‖a‖₁ of FedNova: Σ over steps of how much that step's gradient counts in the end. Without momentum it is the
        number of steps."""
        tau, rho = self.steps(examples), self.momentum
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)

    def batches(self, examples: int, rng: torch.Generator) -> list[Int[Tensor, " batch"]]:
        """Which examples each step looks at. Every epoch has an order of its own, unless it is one batch of
        everything."""
        if examples <= self.batch_size:
            return [torch.arange(examples)] * self.epochs
        epochs = (torch.randperm(examples, generator=rng) for _ in range(self.epochs))
        return [batch for order in epochs for batch in order.split(self.batch_size)]


@dataclass(frozen=True)
class Correction:
    """What is added to each gradient g of a client: offset + pull · (w − w⁰), with w⁰ the global model of the round."""

    pull: float = 0.0
    offset: Mapping[str, Tensor] | None = None
