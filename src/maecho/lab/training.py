"""Local training: what a client does with its own data before it uploads anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.randomness import global_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int


@dataclass(frozen=True)
class LocalTraining:
    """SGD with momentum on the cross-entropy, in shuffled batches."""

    epochs: int = 10
    learning_rate: float = 0.01
    momentum: float = 0.5
    batch_size: int = 64
    weight_decay: float = 0.0
    steps: int | None = None
    """Stop after so many batches, in as many epochs as that takes. None: after `epochs`."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"LocalTraining: epochs must be at least 1, got {self.epochs}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"LocalTraining: learning_rate must be positive and finite, got {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"LocalTraining: momentum must lie in [0, 1), got {self.momentum}")
        if self.batch_size < 1:
            raise ValueError(f"LocalTraining: batch_size must be at least 1, got {self.batch_size}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"LocalTraining: weight_decay must be finite and not negative, got {self.weight_decay}")

        if self.steps is not None and self.steps < 1:
            raise ValueError(f"LocalTraining: steps must be at least 1, got {self.steps}")

    def __call__(
        self,
        model: nn.Module,
        x: Float[Tensor, "n ..."],
        y: Int[Tensor, " n"],
        rng: torch.Generator,
        on_epoch: Callable[[int, float], None] | None = None,
    ) -> None:
        """Train `model` in place, on its own device, and leave it in evaluation mode.

        `rng` is a generator on the CPU. It decides the order of examples and what dropout drops. After each epoch
        `on_epoch` is called with the number of the epoch, from 1, and its mean loss. Parameters that need no gradient
        are not changed.
        """
        if y.ndim != 1 or len(x) != len(y) or not len(y):
            raise ValueError(
                f"LocalTraining: one label an input and at least one, got inputs {tuple(x.shape)} and labels "
                f"{tuple(y.shape)}"
            )
        if y.dtype != torch.int64:
            raise ValueError(f"LocalTraining: labels must be int64, got {y.dtype}")
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"LocalTraining: {type(model).__name__} has no parameter that asks for a gradient")
        device = parameters[0].device
        x, y = x.to(device), y.to(device)
        optimizer = torch.optim.SGD(
            parameters, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        model.train()
        a_pass = -(-len(y) // self.batch_size)
        steps = self.epochs * a_pass if self.steps is None else self.steps
        epochs = -(-steps // a_pass)
        with global_seed(int(torch.randint(2**62, (), generator=rng)), device):
            for epoch in range(1, epochs + 1):
                order = torch.randperm(len(y), generator=rng)[: (steps - (epoch - 1) * a_pass) * self.batch_size]
                loss = self._epoch(model, optimizer, x, y, order.to(device))
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"LocalTraining: the loss must stay finite, got {loss} in epoch {epoch} of {epochs}; "
                        f"lower learning_rate={self.learning_rate} or momentum={self.momentum}"
                    )
                if on_epoch is not None:
                    on_epoch(epoch, loss)
        model.eval()

    def _epoch(self, model: nn.Module, optimizer: torch.optim.SGD, x: Tensor, y: Tensor, order: Tensor) -> float:
        """Pass over the examples in that order; return the mean loss."""
        total = torch.zeros((), device=x.device)
        # One shuffled copy, cut into views: a step needs no indexing.
        for inputs, labels in zip(
            torch.split(x[order], self.batch_size), torch.split(y[order], self.batch_size), strict=True
        ):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            # The sum stays on the device: to read it here would make a GPU wait after every step.
            total += loss.detach() * len(labels)
        return float(total) / len(order)
