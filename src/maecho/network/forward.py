"""Runs batches through a model, and leaves the model as it was.

Only this module knows what a batch may be: (inputs, labels), (inputs, anything) or inputs alone. Inputs are a tensor or
a mapping of tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.errors import InputError, text_of
from maecho.progress import track


@dataclass(frozen=True)
class Pass:
    """One batch, and the model's output for it."""

    inputs: Any
    labels: Tensor | None
    """One class for each example; None if the batch has no such labels."""
    output: Any
    size: int


def forward(
    model: nn.Module, batches: Iterable[Any], label: str, progress: bool | None = None, graph: bool = False
) -> Iterator[Pass]:
    """Run every batch in evaluation mode on the model's own device. Empty batches are skipped.

    With `graph`, gradients of the outputs can be taken. Afterwards every module has its own mode again, also if the
    caller stops early.
    """
    device = devices.of(model)
    with evaluating(model):
        for batch in track(batches, label, show=progress):
            x, y = parts(batch, label)
            size = examples(x)
            if size:
                if isinstance(x, Tensor) and x.is_floating_point() and not x.isfinite().all():
                    raise InputError(f"{label}: the inputs must be finite, got NaN or infinity")
                try:
                    with torch.set_grad_enabled(graph):
                        output = call(model, x, device)
                except RuntimeError as error:
                    shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                    raise InputError(
                        f"{label}: the model must take inputs {shape}, got an error: {text_of(error)}"
                    ) from error
                yield Pass(x, _class_labels(y, size), output, size)


def parts(batch: Any, label: str) -> tuple[Any, Any]:
    """The inputs of a batch, and its second part. None if it has no second part."""
    if not isinstance(batch, tuple | list):
        return batch, None
    if not batch:
        raise InputError(f"{label}: a batch must hold inputs, got an empty {type(batch).__name__}")
    return batch[0], batch[1] if len(batch) > 1 else None


def examples(x: Any) -> int:
    """How many examples the inputs of a batch hold."""
    return len(next(iter(x.values())) if isinstance(x, Mapping) else x)


def check_labels(labels: Tensor, classes: int, client: str) -> None:
    """Raise InputError unless every label is the number of a class."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InputError(
            f"{client}: labels must lie in 0 … {classes - 1}, since the model has {classes} outputs, "
            f"got {low if low < 0 else high}"
        )


def call(model: Callable[..., Any], x: Any, device: torch.device) -> Any:
    """The model's output for one batch of inputs. Of several outputs it is the first."""
    args, kwargs = arguments(x, device)
    output = model(*args, **kwargs)
    return output[0] if isinstance(output, tuple | list) else output


def arguments(x: Any, device: torch.device, copy: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, by position and by name, with which a model is called for one batch of inputs."""
    if isinstance(x, Mapping):
        return [], {k: v.to(device, copy=copy) if isinstance(v, Tensor) else v for k, v in x.items()}
    return [x.to(device, copy=copy) if isinstance(x, Tensor) else x.to(device)], {}


def few(x: Any, most: int = 4) -> Any:
    """The inputs of the first few examples, in memory of their own.

    Inputs come whole if their examples cannot be told apart.
    """
    if isinstance(x, Tensor):
        return (x[:most] if x.layout is torch.strided else x).clone()
    if not isinstance(x, Mapping):
        return x
    n = examples(x)
    apart = all(isinstance(v, Tensor) and v.dim() and len(v) == n for v in x.values())
    return {k: few(v, most if apart else len(v)) if isinstance(v, Tensor) and v.dim() else v for k, v in x.items()}


def stand_in(x: Any) -> Any:
    """Inputs of the same shapes that say nothing about the data: normal numbers, and otherwise zeros."""
    if isinstance(x, Mapping):
        return {k: stand_in(v) if isinstance(v, Tensor) else v for k, v in x.items()}
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return torch.zeros_like(x) if isinstance(x, Tensor) else x
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(device=x.device, dtype=x.dtype)


def _class_labels(y: Any, size: int) -> Tensor | None:
    if isinstance(y, Tensor) and not y.is_floating_point() and not y.is_complex() and y.shape == (size,):
        return y.long()
    return None


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in evaluation mode. Afterwards each has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
