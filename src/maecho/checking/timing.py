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

TIMES = 3
"""A pass is timed so often, after a first time that does not count. The shortest counts."""


def now(device: torch.device) -> float:
    """The time, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forward_and_step(model: nn.Module, inputs: Any, outputs: Read | None) -> tuple[float, float | None]:
    """The seconds of a forward pass, and of a forward and a backward pass. None if nothing can be differentiated."""
    device = devices.of(model)
    trained = [p for p in model.parameters() if p.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            call(model, inputs, device, outputs)

    def step() -> None:
        with torch.enable_grad():
            found = [t for t in tree_leaves(call(model, inputs, device, outputs)) if isinstance(t, Tensor)]
            loss = sum((t.float().square().mean() for t in found if t.requires_grad), torch.zeros((), device=device))
            torch.autograd.grad(loss, trained, allow_unused=True)

    with evaluating(model):
        once = _shortest(forward, device)
        try:
            return once, _shortest(step, device)
        except RuntimeError:
            return once, None


def _shortest(run: Callable[[], None], device: torch.device) -> float:
    run()
    found = []
    for _ in range(TIMES):
        began = now(device)
        run()
        found.append(now(device) - began)
    return min(found)


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
