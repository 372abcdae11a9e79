"""The base of modules that are split into plain layers, and the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from maecho.network.packed.storage import Stored

Part = tuple[str, Tensor, slice]
"""A tensor of the packed module: its name, the tensor, and the rows that are wanted."""
ALL = slice(None)


class Matrix(nn.Linear):
    """A fully connected layer of a split module."""

    def forward(self, x: Tensor, wanted: bool = True) -> Tensor:
        """The product. If nobody wants it and no hook looks at it, x is returned, since only hooks should see x."""
        return super().forward(x) if wanted or self._forward_hooks else x


class Recurrent(Matrix):
    """A matrix inside the loop of a recurrence: what it gives out comes back as its own input."""


class Linears:
    """Makes layers of rows of tensors. Rows of one tensor become one parameter however often they are asked for, so
    that what is tied stays tied."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], nn.Parameter] = {}

    def make(self, weight: Part, bias: Part | None, kind: type[Matrix] = Matrix) -> Matrix:
        # On the meta device, so that no random numbers are drawn for weights that are not wanted.
        W = self._parameter(weight)
        layer = kind(W.shape[1], W.shape[0], bias=bias is not None, device="meta")
        layer.weight = W
        if bias is not None:
            layer.bias = self._parameter(bias)
        return layer.eval()

    def _parameter(self, part: Part) -> nn.Parameter:
        _, tensor, rows = part
        start, stop, _ = rows.indices(len(tensor))
        key = (id(tensor), start, stop)
        if key not in self._made:
            values = tensor.detach()[start:stop].clone(memory_format=torch.contiguous_format)
            self._made[key] = nn.Parameter(values, tensor.requires_grad)
        return self._made[key]


class Split(nn.Module):
    """Computes what a module computes that keeps several matrices in a parameter, by layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[str, list[str]] = {}
        self.beside: Callable[[tuple[Any, ...], dict[str, Any], Any], None] | None = None
        """Sees arguments and outputs, to compare them with those of the module that was split."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        if self.beside is not None:
            self.beside(args, kwargs, out)
        return out

    def add(self, name: str, linears: Linears, weight: Part, bias: Part | None, kind: type[Matrix] = Matrix) -> None:
        """Make a layer. The parts of a tensor must be added in the order of their rows."""
        self.add_module(name, linears.make(weight, bias, kind))
        for key, part in (("weight", weight), ("bias", bias)):
            if part is not None:
                self._stored.setdefault(part[0], []).append(f"{name}.{key}")

    def part(self, name: str) -> Matrix:
        """The layer of this name."""
        found = self.get_submodule(name)
        assert isinstance(found, Matrix)
        return found

    def stored(self) -> list[Stored]:
        """How the tensors of the module are made of the layers' weights."""
        return [Stored(name, tuple(parts)) for name, parts in self._stored.items()]
