"""The base of the statistics that need gradients, and what they see of a batch.

The passes themselves run in `passes/backward.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maecho.network.directions import Directions
from maecho.network.forward import Pass
from maecho.network.layers import Layer
from maecho.statistics.statistic import Gatherer, NotGathered, Setting


@dataclass(frozen=True)
class Call:
    """One use of a layer, with its inputs x and its outputs z."""

    layer: Layer
    module: nn.Module
    x: Tensor
    z: Tensor


@dataclass(frozen=True)
class Batch:
    """A batch whose outputs can be differentiated."""

    step: Pass
    calls: Sequence[Call]
    directions: Directions
    order: Sequence[int]
    """The numbers of the directions, with the largest direction first."""

    def backward(self, v: Tensor, of: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """vᵀ ∂output/∂t for each tensor t in `of`; None if the output does not depend on t."""
        if not of:
            return ()
        output = self.step.output
        return torch.autograd.grad(output, list(of), v.to(output), retain_graph=True, allow_unused=True)


Deltas = Mapping[int, Tensor | None]
"""Id of a call -> the gradient at its outputs."""


class BackwardGatherer(Gatherer):
    """A Gatherer that also sees gradients."""

    needs_sums = False
    """Whether it wants the gradients of all parameters. They are computed in the first direction only."""
    reason = ""
    """Why there is no value; empty if there is one."""

    def begin(self, batch: Batch) -> None:
        """Called before the backward passes of a batch."""

    @abstractmethod
    def see_gradients(self, batch: Batch, deltas: Deltas, sums: Mapping[str, Tensor | None] | None) -> None:
        """Called after each backward pass. `sums` are the gradients of the parameters, summed over the batch; None
        except in the first direction."""

    def end(self, batch: Batch) -> None:
        """Called after the backward passes of a batch."""

    def check_gathered(self) -> None:
        """Raise NotGathered if there is a reason why there is no value."""
        if self.reason:
            raise NotGathered(self.reason)


def parameters(setting: Setting) -> dict[str, nn.Parameter]:
    """Every parameter of floating point, by its name in an upload."""
    aliases = setting.architecture.aliases
    return {aliases.get(name, name): p for name, p in setting.model.named_parameters() if p.is_floating_point()}
