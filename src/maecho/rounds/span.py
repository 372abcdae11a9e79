"""Stacked clients whose first layer stays in the span of their own inputs.

Most of a small MLP's work is its first layer. Its inputs are the client's own examples X and never change, so its
weights are W = W⁰ + Aᵀ X + t O all the time, with a row of A for each example and the offset O of the server's
correction. Products with X become products with X Xᵀ. This is exact, and less work where a client has fewer examples
than the layer has inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from maecho.rounds.local import Local
from maecho.rounds.stack import Stack, Work

SHARE = "share of the offset"
"""The name of t among the stacked tensors. No parameter has it, since a parameter's name has no spaces here."""


class InSpan(Stack):
    """A stack for a chain whose first layer is `layer`; see `first_linear`."""

    def __init__(
        self, model: nn.Sequential, layer: str, start: Mapping[str, Tensor], works: Sequence[Work], local: Local
    ) -> None:
        self._first = f"{layer}.weight"
        self._bias = f"{layer}.bias" if f"{layer}.bias" in start else None
        super().__init__(model, start, works, local)
        self._tail = _Tail(model, layer)
        flat = self._x.flatten(2)
        W = start[self._first].detach()
        self._rows, self._z, self._inner = flat, flat @ W.T, flat @ flat.mT
        offsets = [w.correction.offset for w in works]
        self._offsets: Tensor | None = None
        if any(offset is not None for offset in offsets):
            self._offsets = torch.stack([torch.zeros_like(W) if o is None else o[self._first] for o in offsets])
            self._of_offset = flat @ self._offsets.mT
            self._stacked[SHARE] = W.new_zeros(len(works))
        self._stacked[self._first] = W.new_zeros(len(works), flat.shape[1], len(W))
        self._velocity = {name: torch.zeros_like(t) for name, t in self._stacked.items()}

    def _trained(self) -> list[str]:
        return [name for name in self._origin if name != self._first]

    def weights(self, place: int) -> dict[str, Tensor]:
        found = {name: self._stacked[name][place].clone() for name in self._trained()}
        W = self._origin[self._first] + self._stacked[self._first][place].T @ self._rows[place]
        if self._offsets is not None:
            W = W + self._stacked[SHARE][place] * self._offsets[place]
        return found | {self._first: W}

    def _gradients(self, active: int, rows: Tensor, index: Tensor, counted: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        parts = {name: self._stacked[name][:active].detach().requires_grad_() for name in self._trained()}
        inner = self._pick(self._inner, rows, index)
        z = torch.baddbmm(self._pick(self._z, rows, index), inner, self._stacked[self._first][:active])
        if self._offsets is not None:
            z += self._stacked[SHARE][:active].reshape(-1, 1, 1) * self._pick(self._of_offset, rows, index)
        z.requires_grad_()
        shifted = z if self._bias is None or self._bias not in parts else z + parts[self._bias].unsqueeze(1)
        if self._bias is not None and self._bias not in parts:
            shifted = z + self._fixed[self._bias]
        fixed = {name: t for name, t in self._fixed.items() if name != self._bias}

        def of_one(own: dict[str, Tensor], inputs: Tensor) -> Any:
            return functional_call(self._tail, {**fixed, **own}, (inputs,))

        others = {name: part for name, part in parts.items() if name != self._bias}
        logits = vmap(of_one)(others, shifted)
        found = self._backward(self._losses(logits, rows, index), counted, sizes, {**parts, self._first: z})
        of_z = found.pop(self._first)
        A = self._stacked[self._first][:active]
        if of_z.shape == A.shape and self._plan.whole:
            found[self._first] = of_z
        else:
            found[self._first] = torch.zeros_like(A).scatter_add_(1, index.unsqueeze(-1).expand_as(of_z), of_z)
        if self._offsets is not None:
            found[SHARE] = of_z.new_zeros(active)
        return found

    def _from(self, name: str) -> Tensor:
        return torch.zeros(()) if name in (self._first, SHARE) else super()._from(name)

    def _offset(self, work: Work, name: str) -> Tensor:
        if name == self._first:
            return torch.zeros_like(self._stacked[name][0])
        if name == SHARE:
            return self._stacked[name].new_tensor(0.0 if work.correction.offset is None else 1.0)
        return super()._offset(work, name)

    def _squared_norms(self, active: int, rows: Tensor, index: Tensor, gradients: Mapping[str, Tensor]) -> Tensor:
        """‖Gᵀ X + s O‖² = ⟨G, X Xᵀ G⟩ + 2 s ⟨G, X Oᵀ⟩ + s² ‖O‖² for the first layer."""
        others = {name: g for name, g in gradients.items() if name not in (self._first, SHARE)}
        G = gradients[self._first]
        found = super()._squared_norms(active, rows, index, others) + (G * (self._inner[:active] @ G)).flatten(1).sum(1)
        if self._offsets is not None:
            s = gradients[SHARE]
            found += 2 * s * (G * self._of_offset[:active]).flatten(1).sum(1)
            found += s.square() * self._offsets[:active].flatten(1).square().sum(1)
        return found.clamp(min=0)


class _Tail(nn.Module):
    """What comes after the first layer, under the same names."""

    def __init__(self, model: nn.Sequential, layer: str) -> None:
        super().__init__()
        names = list(model._modules)
        for name in names[names.index(layer) + 1 :]:
            self.add_module(name, getattr(model, name))

    def forward(self, x: Tensor) -> Tensor:
        for module in self._modules.values():  # children() leaves out what comes a second time
            assert module is not None
            x = module(x)
        return x


def first_linear(model: nn.Module, x: Tensor) -> str | None:
    """The name of the layer that alone reads the inputs and whose inputs are one row an example, if the network is a
    chain that begins with one."""
    if type(model) is not nn.Sequential:
        return None
    rows = x.dim() == 2
    for name, module in zip(model._modules, model, strict=True):
        if type(module) is nn.Linear:
            return name if rows and module.weight.requires_grad else None
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            rows = True
        elif type(module) is not nn.Identity:
            return None
    return None
