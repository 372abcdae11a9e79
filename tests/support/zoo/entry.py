"""One network of the zoo: how it is made, which task it learns, and what it learns it from."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.network.batches.reading import scores
from maecho.network.plain import plain

CLASSES, TOKENS, LENGTH, BATCH = 4, 24, 8, 16
Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Takes labels, gives an input for each."""


def tokens(y: Tensor, generator: torch.Generator) -> Tensor:
    """Sentences of eight words: of every class some words are common, and the words stand in any order."""
    likely = torch.ones(CLASSES, TOKENS - 4)
    for c in range(CLASSES):
        likely[c, 4 * c : 4 * c + 4] = 6
    return 4 + torch.multinomial(likely[y], LENGTH, replacement=True, generator=generator)


def ended(y: Tensor, generator: torch.Generator) -> Tensor:
    """The same sentences, and the token that ends them."""
    return functional.pad(tokens(y, generator), (0, 1), value=2)


def _of_patterns(shape: tuple[int, ...], smooth: int, noise: float) -> Draw:
    """Inputs of this shape: a pattern of the class, which is coarse along the places, and noise."""

    def draw(y: Tensor, generator: torch.Generator) -> Tensor:
        coarse = (shape[0], *(max(1, size // smooth) for size in shape[1:]))
        patterns = torch.randn(CLASSES, *coarse, generator=torch.Generator().manual_seed(17))
        if smooth > 1:
            patterns = functional.interpolate(patterns, shape[1:], mode="bilinear" if len(shape) == 3 else "linear")
        return patterns[y] + noise * torch.randn(len(y), *shape, generator=generator)

    return draw


pictures = _of_patterns((3, 16, 16), 4, 1.0)
small_pictures = _of_patterns((1, 8, 8), 2, 1.0)
sound = _of_patterns((1, 256), 8, 0.7)
vectors = _of_patterns((12,), 1, 1.0)
sequences = _of_patterns((6, 5), 1, 1.0)


def wave(y: Tensor, generator: torch.Generator) -> Tensor:
    return sound(y, generator)[:, 0]


@dataclass(frozen=True)
class Entry:
    """A network that people bring, and what it is trained on."""

    make: Callable[[], nn.Module]
    draw: Draw
    argument: str = ""
    """The name under which the network takes its input. It is given by position if this is empty."""
    steps: int = 40
    rate: float = 3e-3
    waits_for: dict[str, str] = field(default_factory=dict)
    """What does not hold yet -> why. The keys are those of a check, such as "alone: ot", or "*" for all."""

    def batches(self, labels: Tensor, seed: int) -> list[Any]:
        """Batches of examples with these labels."""
        x = self.draw(labels, torch.Generator().manual_seed(seed))
        pairs = zip(x.split(BATCH), labels.split(BATCH), strict=True)
        return [{self.argument: a, "labels": b} for a, b in pairs] if self.argument else list(pairs)

    def train(self, seed: int, labels: Tensor, model: nn.Module | None = None) -> nn.Module:
        """A network after a few steps of Adam, from random weights or from those of a model."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            trained = self.make() if model is None else copy.deepcopy(model)
            data = self.batches(labels, 1000 + seed)
            parameters = [p for p in trained.parameters() if p.requires_grad]
            optimiser = torch.optim.Adam(parameters, self.rate)
            trained.train()
            for step in range(self.steps):
                x, y = self.parts(data[step % len(data)])
                optimiser.zero_grad()
                functional.cross_entropy(self.scores(trained, x), y).backward()
                optimiser.step()
            _settle(trained, [self.parts(batch)[0] for batch in data], self.scores)
        return trained.eval()

    def parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        return (batch[self.argument], batch["labels"]) if self.argument else batch

    def scores(self, model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = scores(model(**{self.argument: x}) if self.argument else model(x))
        return found

    def outputs(self, model: nn.Module, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """The scores for all examples, and their labels."""
        pairs = [self.parts(batch) for batch in batches]
        with torch.no_grad():
            found = torch.cat([self.scores(model, x) for x, _ in pairs])
        return found.double(), torch.cat([y for _, y in pairs])

    def loaded(self, model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
        """A copy of the network inside a model, with other weights."""
        twin = copy.deepcopy(plain(model))
        twin.load_state_dict(state)
        return twin.eval()


def labels(n: int, seed: int, common: Sequence[int] = range(CLASSES), rare: float = 0.1) -> Tensor:
    """Labels of which most are common ones. Every label is among them."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.full((CLASSES,), rare)
    every[list(common)] = 1.0
    drawn = torch.multinomial(every, n - 2 * CLASSES, replacement=True, generator=generator)
    both = torch.cat([torch.arange(CLASSES).repeat(2), drawn])
    return both[torch.randperm(n, generator=generator)]


@functools.cache
def everyone(n: int, seed: int) -> Tensor:
    return labels(n, seed)


def _settle(model: nn.Module, inputs: Sequence[Tensor], run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Make all running statistics those of these inputs. A few steps move those of some networks by little."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        for x in inputs if norms else ():
            run(model, x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
