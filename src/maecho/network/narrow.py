"""Finds where a network is narrow: a layer whose inputs hold everything that the network uses of an example.

In most networks the first fully connected layer after other layers is narrow. Its inputs are the features that the
convolutions have found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.network.attention import slow_path
from maecho.network.batches.reading import Read
from maecho.network.forward import call
from maecho.network.hooks import watching
from maecho.network.layers import Architecture


def narrow(
    model: nn.Module, architecture: Architecture, inputs: Any, seen: Mapping[str, Tensor], outputs: Read | None = None
) -> str | None:
    """The first fully connected layer that no other path leads past. The very first layer does not count.

    To test a layer, the network gets inputs that are NaN, and the layer gets zeros. If another path leads past the
    layer, the output is NaN.

    Args:
        model: the model. It is not changed.
        architecture: the architecture of the model.
        inputs: a batch.
        seen: the input of each layer when the model ran this batch, in order of execution.
        outputs: finds the scores in what the model returns.
    """
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        return None
    device = devices.of(model)
    modules: dict[str, list[str]] = {}
    for name, layer in architecture.layers.items():
        modules.setdefault(layer.name, []).append(name)
    for name in list(seen)[1:]:
        if len(modules[name]) > 1 or not architecture.layers[name].one_row_each(seen[name], len(inputs)):
            continue
        calls: list[None] = []

        def blank(name: str, module: nn.Module, x: Tensor, calls: list[None] = calls) -> Tensor:
            calls.append(None)
            return torch.zeros_like(x)

        tried = contextlib.suppress(RuntimeError, ValueError)
        with watching(model, [name], blank), torch.no_grad(), slow_path(), tried:
            output = call(model, torch.full_like(inputs, torch.nan), device, outputs)
            if len(calls) == 1 and isinstance(output, Tensor) and bool(output.isfinite().all()):
                return name
    return None
