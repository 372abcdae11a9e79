"""What a client can say of its features: where its network is narrow, and moments of what passes there.

A layer is narrow if all that the network makes of an example passes through its inputs. The first fully connected layer
behind others is one in most networks: what convolutions found, before anything is decided. Moments of its inputs are to
the layers from there on what moments of the raw inputs are to the whole network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from maecho.network.attention import slow_path
from maecho.network.forward import Pass, call
from maecho.network.layers import Architecture
from maecho.statistics.gaussians import Covariance, Moments
from maecho.statistics.scatter import ClassScatter

Change = Callable[[Tensor], Tensor | None]
"""Given the inputs of a layer: others in their place, or None to leave them."""


class Features:
    """Moments of a client's features, a batch at a time."""

    def __init__(self, model: nn.Module, architecture: Architecture, covariance: Covariance = "class"):
        self._model, self._architecture = model, architecture
        self._scatter = ClassScatter(1, covariance)
        self._seen: dict[str, Tensor] = {}
        self._layer: str | None = None
        self.busy = False
        """Whether the model is being tried out, so that what runs through it is no data."""
        self.reason = ""
        """Why there are none."""

    def see(self, layer: str, x: Tensor) -> None:
        if self._layer in (None, layer) and not self.reason:
            self._seen[layer] = x.detach()

    def add(self, step: Pass) -> None:
        """A batch, all of whose layers have been seen."""
        if self._layer is None and not self.reason:
            self._find(step)
        if self._layer is not None:
            x = self._seen[self._layer]
            if x.shape[0] != step.size:
                self._layer, self.reason = None, "the network is narrow for some batches and not for others"
            else:
                self._scatter.add(x, step.labels)
        self._seen.clear()

    def _find(self, step: Pass) -> None:
        self.busy = True
        try:
            self._layer = narrow(self._model, self._architecture, step.inputs, self._seen)
        finally:
            self.busy = False
        if self._layer is None:
            self.reason = "the network has no fully connected layer behind others that all examples pass through"

    def moments(self) -> dict[str, Moments]:
        return {} if self._layer is None or self.reason else {self._layer: self._scatter.moments()}


def narrow(model: nn.Module, architecture: Architecture, inputs: Any, seen: dict[str, Tensor]) -> str | None:
    """The first fully connected layer, not counting the very first layer, that nothing goes around.

    `seen`: what has reached each layer, in order of execution, when the model ran these inputs. A layer is tried with
    inputs of the network that are not a number, and its own put to 0: were there a way around it, the output would not
    be a number either.
    """
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    weights = model.state_dict()
    modules: dict[str, list[str]] = {}
    for name, layer in architecture.layers.items():
        modules.setdefault(layer.name, []).append(name)
    for name in list(seen)[1:]:
        layer = architecture.layers[name]
        plain = layer.shape(weights)[0] == 1 and not layer.transposed and weights[layer.weight].dim() == 2
        if not plain or len(modules[name]) > 1 or seen[name].dim() != 2 or len(seen[name]) != len(inputs):
            continue
        calls: list[None] = []

        def blank(x: Tensor, calls: list[None] = calls) -> Tensor:
            calls.append(None)
            return torch.zeros_like(x)

        with changed(model, name, blank), torch.no_grad(), slow_path(), contextlib.suppress(RuntimeError, ValueError):
            output = call(model, torch.full_like(inputs, torch.nan), device)
            if len(calls) == 1 and isinstance(output, Tensor) and bool(output.isfinite().all()):
                return name
    return None


@contextlib.contextmanager
def changed(model: nn.Module, layer: str, change: Change) -> Iterator[None]:
    """Inside, `change` decides what reaches a layer of the model."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["input"]
        y = change(x)
        if y is None:
            return None
        return ((y, *args[1:]), kwargs) if args else (args, {**kwargs, "input": y})

    handle = model.get_submodule(layer).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
