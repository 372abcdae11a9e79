"""How long things take on one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from maecho import devices
from maecho.network.batches.reading import Read
from maecho.network.forward import call, evaluating

TIMES, LONG = 20, 0.2
"""A pass is timed so often, or until so many seconds are over, after a first time that does not count. The mean counts:
another program on the machine slows the real work as well."""


def now(device: torch.device) -> float:
    """The time, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forward_and_step(model: nn.Module, inputs: Any, outputs: Read | None) -> tuple[float, float | None]:
    """The seconds of a forward pass, and of a step of training: forward, backward, and a sum for each weight. None if
    nothing can be differentiated."""
    device = devices.of(model)
    trained = [p for p in model.parameters() if p.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            call(model, inputs, device, outputs)

    def step() -> None:
        with torch.enable_grad():
            found = [t for t in tree_leaves(call(model, inputs, device, outputs)) if isinstance(t, Tensor)]
            loss = sum((t.float().square().mean() for t in found if t.requires_grad), torch.zeros((), device=device))
            found_gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for p, gradient in zip(trained, found_gradients, strict=True):
            if gradient is not None:
                torch.add(p.detach(), gradient, alpha=0.1)  # a step of SGD; the weights stay as they are

    with evaluating(model):
        once = _mean(forward, device)
        try:
            return once, _mean(step, device)
        except RuntimeError:
            return once, None


def _mean(run: Callable[[], None], device: torch.device) -> float:
    run()
    began, runs, seconds = now(device), 0, 0.0
    while runs < TIMES and seconds < LONG:
        run()
        runs, seconds = runs + 1, now(device) - began
    return seconds / runs


class Twice:
    """One batch twice. The first time does not count; `seconds` is how long the second one took."""

    def __init__(self, batch: Any, device: torch.device):
        self._batch, self._device = batch, device
        self.seconds = self.ended = 0.0

    def __iter__(self) -> Iterator[Any]:
        yield self._batch
        began = now(self._device)
        yield self._batch
        self.ended = now(self._device)
        self.seconds = self.ended - began
