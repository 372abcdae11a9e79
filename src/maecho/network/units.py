"""The parts of a network that are fitted one after another.

A unit is a matrix: a layer, a layer together with the BatchNorm that follows it at once, or a norm's scale and shift.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maecho.network import kinds, layers, norms
from maecho.network.layers import Architecture, Layer
from maecho.network.packed.linears import Recurrent


@dataclass(frozen=True)
class Unit:
    """One matrix [W b], and the modules that apply it."""

    layer: Layer
    modules: tuple[str, ...]
    """The names of the modules. There are several if modules share a weight."""
    norm: str | None = None
    """The BatchNorm that follows at once. Then the matrix is that of both together."""
    diagonal: bool = False
    """Whether it is a norm by itself."""

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def bias(self) -> bool:
        return self.layer.bias is not None or self.norm is not None

    @property
    def ends(self) -> tuple[str, ...]:
        """The modules whose outputs are the products of the matrix."""
        return self.modules if self.norm is None else (self.norm,)

    def rows(self, module: nn.Module, x: Tensor) -> Tensor:
        """The rows that the matrix multiplies when x enters one of its modules: [groups, n, in], or tokens [1, n]."""
        return norms.norm_rows(module, x) if self.diagonal else kinds.rows(module, x)

    def output_rows(self, module: nn.Module, z: Tensor) -> Tensor:
        """Its outputs as rows [groups, n, out], in the order of `rows`."""
        return norms.norm_output_rows(module, z) if self.diagonal else kinds.output_rows(module, z)

    def parameters(self, model: nn.Module) -> set[str]:
        """The names of its parameters in the state_dict. Running statistics are among them, counters are not."""
        own = {self.layer.weight} | ({self.layer.bias} if self.layer.bias else set())
        for name in (self.norm, self.name if self.diagonal else None):
            if name is not None:
                state = model.get_submodule(name).state_dict()
                own |= {f"{name}.{key}" if name else key for key, t in state.items() if t.is_floating_point()}
        return own

    def matrix(self, model: nn.Module) -> Tensor:
        """[W b] of the unit in a model, in float64. For a BatchNorm by itself it is the matrix for its raw inputs."""
        module = model.get_submodule(self.name)
        if self.diagonal:
            return torch.stack(norms.affine(module), -1).unsqueeze(1)
        W = self.layer.matrix(model.state_dict()).double()
        if self.norm is None:
            return W
        a, c = (part.reshape(*W.shape[:2], 1) for part in norms.affine(model.get_submodule(self.norm)))
        b = torch.zeros_like(c) if self.layer.bias is None else W[..., -1:]
        return torch.cat([a * (W if self.layer.bias is None else W[..., :-1]), a * b + c], -1)


def matrices(architecture: Architecture) -> dict[str, Unit]:
    """The layers of a network as units by name."""
    found: dict[str, Unit] = {}
    for name, layer in architecture.layers.items():
        before = found[layer.name].modules if layer.name in found else ()
        found[layer.name] = Unit(layer, (*before, name))
    return found


def is_fitted(module: nn.Module) -> bool:
    """Whether a layer is fitted as a unit. A matrix on hidden states is not, but averaged: its own outputs come back as
    its inputs, so no regression knows what they will be. benchmarks/recurrent.py measures both."""
    return not isinstance(module, Recurrent)


def network(model: nn.Module) -> dict[str, Unit]:
    """All units of a network by name. No BatchNorm is joined to a layer. The network must be a twin."""
    everything = matrices(layers.read(model))
    found = {
        name: unit for name, unit in everything.items() if all(map(is_fitted, map(model.get_submodule, unit.modules)))
    }
    for name, layer in norms.find(model).items():
        found[name] = Unit(layer, (name,), diagonal=True)
    return found
