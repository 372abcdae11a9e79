"""Stacked clients of a chain of linear layers and activations, without torch.func.

The gradient of a linear layer is Σ_b g_b h_bᵀ, with inputs h and gradients g of its outputs. It is added to the
momentum in one product, and never stands in memory by itself: for small batches that is most of the time of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from maecho.rounds.training.stack import Gradient, Outer

if TYPE_CHECKING:
    from jaxtyping import Float

POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity)
"""Modules that see every number by itself."""


def is_chain(modules: Sequence[nn.Module]) -> bool:
    """Whether these modules, one after the other, are linear layers and activations alone."""
    return all(type(module) is nn.Linear or type(module) in POINTWISE for module in modules)


@dataclass(frozen=True)
class Passed:
    """A linear layer that was run."""

    weight: str
    bias: str
    inputs: Float[Tensor, "clients batch i"]
    outputs: Float[Tensor, "clients batch o"]

    def gradients(self, of_outputs: Tensor, trained: Mapping[str, Tensor]) -> dict[str, Gradient]:
        """Of its parameters, as far as they are trained."""
        found: dict[str, Gradient] = {}
        if self.weight in trained:
            found[self.weight] = Outer(of_outputs, self.inputs)
        if self.bias in trained:
            found[self.bias] = of_outputs.sum(1)
        return found


def run(
    modules: Mapping[str, nn.Module], x: Tensor, stacked: Mapping[str, Tensor], fixed: Mapping[str, Tensor]
) -> tuple[Tensor, list[Passed]]:
    """The outputs of a chain, and its linear layers in order. `stacked` has one parameter for each client, `fixed` one
    for all."""
    passed = []
    for name, module in modules.items():
        if type(module) is not nn.Linear:
            x = module(x.clone() if getattr(module, "inplace", False) else x)
            continue
        weight, bias, inputs = f"{name}.weight", f"{name}.bias", x
        x = x @ (stacked[weight] if weight in stacked else fixed[weight]).mT
        if bias in stacked:
            x = x + stacked[bias].unsqueeze(1)
        elif bias in fixed:
            x = x + fixed[bias]
        if not x.requires_grad:
            x.requires_grad_()
        passed.append(Passed(weight, bias, inputs.detach(), x))
    return x, passed
