"""Stacked clients whose first layer stays in the span of their own inputs.

Most of a small MLP's work is its first layer. Its inputs are the client's own examples X and never change, so its
weights are W = W⁰ + Aᵀ X + t O all the time, with a row of A for each example and the offset O of the server's
correction. Products with X become products with X Xᵀ. This is exact, and less work where a client has fewer examples
than the layer has inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from maecho.rounds.training.chain import is_chain, run
from maecho.rounds.training.local import Local
from maecho.rounds.training.stack import Gradient, Stack, Work, dense

SHARE = "share of the offset"
"""The name of t among the stacked tensors. No parameter has it, since a parameter's name has no spaces here."""


class InSpan(Stack):
    """A stack for a chain whose first layer is `layer`; see `first_linear`."""

    def __init__(
        self, model: nn.Sequential, layer: str, start: Mapping[str, Tensor], works: Sequence[Work], local: Local
    ) -> None:
        self._first = f"{layer}.weight"
        self._bias = f"{layer}.bias"
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
        W = torch.addmm(self._origin[self._first], self._stacked[self._first][place].T, self._rows[place])
        if self._offsets is not None:
            W = W + self._stacked[SHARE][place] * self._offsets[place]
        return found | {self._first: W}

    def _gradients(
        self, active: int, rows: Tensor, index: Tensor, counted: Tensor, sizes: Tensor
    ) -> dict[str, Gradient]:
        z = torch.baddbmm(
            self._pick(self._z, rows, index), self._pick(self._inner, rows, index), self._stacked[self._first][:active]
        )
        if self._offsets is not None:
            z += self._stacked[SHARE][:active].reshape(-1, 1, 1) * self._pick(self._of_offset, rows, index)
        if self._bias in self._stacked:
            z += self._stacked[self._bias][:active].unsqueeze(1)
        elif self._bias in self._fixed:
            z += self._fixed[self._bias]
        z.requires_grad_()
        found = self._of_tail(z, active, rows, index, counted, sizes)
        of_z = dense(found.pop(self._first))
        if self._bias in self._stacked:
            found[self._bias] = of_z.sum(1)
        A = self._stacked[self._first][:active]
        if of_z.shape == A.shape and self._plan.whole:
            found[self._first] = of_z
        else:
            found[self._first] = torch.zeros_like(A).scatter_add_(1, index.unsqueeze(-1).expand_as(of_z), of_z)
        if self._offsets is not None:
            found[SHARE] = of_z.new_zeros(active)
        return found

    def _of_tail(
        self, z: Tensor, active: int, rows: Tensor, index: Tensor, counted: Tensor, sizes: Tensor
    ) -> dict[str, Gradient]:
        """Gradients of all but the first layer. That of z, its outputs, stands under the name of its weights."""
        parts = {n: self._stacked[n][:active] for n in self._trained() if n != self._bias}
        fixed = {n: t for n, t in self._fixed.items() if n != self._bias}
        if self._tail.is_chain:
            logits, passed = run(self._tail.modules_in_order, z, parts, fixed)
            losses = self._losses(logits, rows, index, counted)
            outputs = {layer.weight: layer.outputs for layer in passed}
            of_outputs = self._backward(losses, counted, sizes, {**outputs, self._first: z})
            found: dict[str, Gradient] = {self._first: of_outputs[self._first]}
            for layer in passed:
                found |= layer.gradients(of_outputs[layer.weight], parts)
            return found
        leaves = {name: part.detach().requires_grad_() for name, part in parts.items()}
        logits = vmap(lambda own, x: functional_call(self._tail, {**fixed, **own}, (x,)))(leaves, z)
        losses = self._losses(logits, rows, index, counted)
        return dict(self._backward(losses, counted, sizes, {**leaves, self._first: z}))

    def _from(self, name: str) -> Tensor:
        return torch.zeros(()) if name in (self._first, SHARE) else super()._from(name)

    def _offset(self, work: Work, name: str) -> Tensor:
        if name == self._first:
            return torch.zeros_like(self._stacked[name][0])
        if name == SHARE:
            return self._stacked[name].new_tensor(0.0 if work.correction.offset is None else 1.0)
        return super()._offset(work, name)

    def _squared_norms(self, active: int, rows: Tensor, index: Tensor, gradients: Mapping[str, Gradient]) -> Tensor:
        """‖Gᵀ X + s O‖² = ⟨G, X Xᵀ G⟩ + 2 s ⟨G, X Oᵀ⟩ + s² ‖O‖² for the first layer."""
        others = {name: g for name, g in gradients.items() if name not in (self._first, SHARE)}
        G = dense(gradients[self._first])
        found = super()._squared_norms(active, rows, index, others) + (G * (self._inner[:active] @ G)).flatten(1).sum(1)
        if self._offsets is not None:
            s = dense(gradients[SHARE])
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
        self.is_chain = is_chain(list(self.modules_in_order.values()))

    @property
    def modules_in_order(self) -> dict[str, nn.Module]:
        """With those that come a second time, which children() leaves out."""
        return {name: module for name, module in self._modules.items() if module is not None}

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules_in_order.values():
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
