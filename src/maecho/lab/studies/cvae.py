"""A conditional variational auto-encoder of images: its networks, its training and its draws.

The encoder gives a Gaussian of the latent z from an image and its class; the decoder draws an image from z and the
class. Training maximises log p(x | z, y) − KL(q(z | x, y) ‖ N(0, I)), with p Bernoulli for every pixel.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.randomness import global_seed


@dataclass(frozen=True)
class Shape:
    """The sizes of the networks."""

    classes: int
    pixels: int
    latent: int = 30
    hidden: tuple[int, ...] = (256, 512)
    """The hidden layers of the decoder. The encoder has them in reverse order."""

    def decoder(self, rng: torch.Generator) -> nn.Sequential:
        """From [z, one-hot class] to a logit for each pixel."""
        return _layers((self.latent + self.classes, *self.hidden, self.pixels), rng)

    def encoder(self, rng: torch.Generator) -> nn.Sequential:
        """From [pixels, one-hot class] to the mean and the log variance of z."""
        return _layers((self.pixels + self.classes, *reversed(self.hidden), 2 * self.latent), rng)

    def inputs(self, z: Tensor, labels: Tensor) -> Tensor:
        """What the decoder reads."""
        return torch.cat([z, functional.one_hot(labels, self.classes).to(z)], 1)


@dataclass(frozen=True)
class Training:
    """Adam on the negative evidence lower bound, in shuffled batches."""

    epochs: int = 30
    learning_rate: float = 1e-3
    batch_size: int = 128

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(f"epochs and batch_size must be at least 1, got {self.epochs} and {self.batch_size}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")

    def __call__(
        self,
        shape: Shape,
        encoder: nn.Module,
        decoder: nn.Module,
        x: Tensor,
        y: Tensor,
        rng: torch.Generator,
        on_epoch: Callable[[int, float], None] | None = None,
    ) -> None:
        """Train both in place, on their own device. x: pixels in [0, 1], [n, pixels]. `rng` is on the CPU."""
        parameters = [*encoder.parameters(), *decoder.parameters()]
        device = parameters[0].device
        x, y = x.to(device), y.to(device)
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        with global_seed(int(torch.randint(2**62, (), generator=rng)), device):
            for epoch in range(1, self.epochs + 1):
                order = torch.randperm(len(x), generator=rng).to(device)
                total = torch.zeros((), device=device)
                for rows in order.split(self.batch_size):
                    optimizer.zero_grad()
                    loss = negative_bound(shape, encoder, decoder, x[rows], y[rows])
                    loss.backward()
                    optimizer.step()
                    total += loss.detach() * len(rows)
                if not math.isfinite(mean := float(total) / len(x)):
                    raise FloatingPointError(f"the loss must stay finite, got {mean} in epoch {epoch}")
                if on_epoch is not None:
                    on_epoch(epoch, mean)
        decoder.eval()


def negative_bound(shape: Shape, encoder: nn.Module, decoder: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """−log p(x | z, y) + KL, the mean over examples, with one draw of z for each."""
    mean, log_variance = encoder(torch.cat([x, functional.one_hot(y, shape.classes).to(x)], 1)).chunk(2, 1)
    z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
    logits = decoder(shape.inputs(z, y))
    misfit = functional.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    return (misfit + divergence(mean, log_variance)) / len(x)


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) ‖ N(0, I)), summed over all entries."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()


@torch.no_grad()
def drawn(shape: Shape, decoder: nn.Module, z: Tensor, labels: Tensor) -> Tensor:
    """The images of these classes, as pixels in [0, 1], on the CPU."""
    device = next(decoder.parameters()).device
    found: Tensor = decoder(shape.inputs(z, labels).to(device)).sigmoid().cpu()
    return found


def _layers(sizes: Sequence[int], rng: torch.Generator) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with global_seed(int(torch.randint(2**62, (), generator=rng))):
        for k, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            layers[f"fc{k}"] = nn.Linear(inputs, outputs)
            if k < len(sizes) - 1:
                layers[f"fc{k}_relu"] = nn.ReLU()
    return nn.Sequential(layers)
