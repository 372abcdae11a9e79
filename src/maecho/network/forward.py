"""Runs batches through a model, and leaves the model as it was.

What a batch may be, and where its inputs and labels are: see `batches`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.errors import InputError, text_of
from maecho.network.batches.inputs import NOT_FINITE, arguments, examples, leaves, shapes
from maecho.network.batches.labels import classes_of
from maecho.network.batches.reading import Read, Reader, scores
from maecho.progress import track


@dataclass(frozen=True)
class Pass:
    """One batch, and the model's output for it."""

    inputs: Any
    """What the model got: a tensor, a dict of keywords or a tuple of arguments, as they were before the pass."""
    labels: Tensor | None
    """One class for each example; None if the batch has no such labels."""
    output: Any
    size: int
    no_labels: str = ""
    """Why there are no labels; empty if there are."""


def forward(
    model: nn.Module,
    batches: Iterable[Any],
    label: str,
    progress: bool | None = None,
    graph: bool = False,
    reader: Reader | None = None,
    raw: bool = False,
    before: Callable[[int], None] | None = None,
) -> Iterator[Pass]:
    """Run every batch in evaluation mode on the model's own device. Empty batches are skipped.

    With `graph`, gradients of the outputs can be taken. With `raw`, the output is all that the model returns. `before`
    is called with the number of examples before the model runs. Afterwards every module has its own mode again, also
    if the caller stops early.
    """
    device = devices.of(model)
    reader = reader or Reader(model, label)
    with evaluating(model):
        for batch in track(batches, label, show=progress):
            x, y = reader.read(batch)
            size = examples(x)
            if not size:
                continue
            first = leaves(x)[0]
            if first.is_floating_point() and not first.isfinite().all():
                raise InputError(f"{label}: {NOT_FINITE}")
            if before is not None:
                before(size)
            try:
                with torch.set_grad_enabled(graph):
                    output = call(model, x, device, _same if raw else reader.reading.outputs)
            except (RuntimeError, TypeError, AttributeError) as error:
                raise InputError(
                    f"{label}: the model must take inputs {shapes(x)}, got an error: {text_of(error)}"
                ) from error
            labels, no_labels = classes_of(y, size)
            if y is None and isinstance(output, Tensor) and output.dim() == 1 and len(output) != size:
                raise InputError(
                    f"{label}: the model must give outputs for each of {size} examples, got {len(output)} numbers; if "
                    "this is a single example, use a DataLoader with a batch_size"
                )
            yield Pass(x, labels, output, size, no_labels)


def call(model: Callable[..., Any], x: Any, device: torch.device, outputs: Read | None = None) -> Any:
    """The model's output for one batch of inputs. It gets inputs of its own, since it may write into them.

    Of several outputs it is the first, and of an object with `logits` these, unless `outputs` finds it.
    """
    args, kwargs = arguments(x, device)
    return scores(model(*args, **kwargs), outputs)


def _same(output: Any) -> Any:
    return output


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
