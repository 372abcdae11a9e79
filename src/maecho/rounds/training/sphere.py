"""SphereFed (Dong et al., ECCV 2022): a last layer that nobody trains, and a closed form for it after every round.

Clients with few classes disagree most in the last layer. Here its rows are orthonormal and fixed, the same for
everybody, and it reads h / ‖h‖, so that all clients pull their features to the same places on the sphere. What is
evaluated has a last layer by ridge regression on the merged features, from sums alone:

    W = (Σ y ĥᵀ) (Σ ĥ ĥᵀ + γI)⁻¹,   ĥ = h / ‖h‖

A row of W without a bias gives h and ĥ the same order of scores, so the plain network with W and no bias has the
accuracy of the network on the sphere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.errors import InputError
from maecho.network.hooks import watching
from maecho.options import NOT_NEGATIVE, number

GRAM, SUMS = "sphere gram", "sphere sums"
"""The names of kept sums in the state."""


@dataclass(frozen=True)
class Sphere:
    """The settings.

    Args:
        ridge: γ, as a share of the mean eigenvalue of Σ ĥ ĥᵀ.
        kept: the factor with which sums of earlier rounds count on, from 0 to 1. The paper solves for W once, after the
            last round, with all clients.
    """

    ridge: float = 1e-3
    kept: float = 0.9

    def __post_init__(self) -> None:
        number("ridge", self.ridge, NOT_NEGATIVE, 0)
        number("kept", self.kept, "from 0 to 1", 0, 1)


class FixedHead:
    """The last layer of one network on the sphere."""

    def __init__(self, settings: Sphere, model: nn.Module, x: Tensor) -> None:
        """Raises InputError if the last layer is not an nn.Linear with at least as many inputs as classes."""
        self._settings = settings
        self._name, head = _last_linear(model, x)
        classes, inputs = head.weight.shape
        if inputs < classes:
            raise InputError(
                f"a fixed head needs at least as many inputs as classes, got {inputs} and {classes} in {self._name!r}"
            )
        draw = torch.randn(inputs, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self._rows = torch.linalg.qr(draw).Q.T.to(head.weight)
        self.network = copy.deepcopy(model)
        """The network that clients train."""
        parent, _, last = self._name.rpartition(".")
        setattr(self.network.get_submodule(parent), last, _OnSphere(head, self._rows))

    @property
    def names(self) -> frozenset[str]:
        """The parameters that nobody trains."""
        return frozenset({f"{self._name}.weight", f"{self._name}.bias"})

    def start(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These weights with the fixed head."""
        return self._with(weights, self._rows)

    def _with(self, weights: Mapping[str, Tensor], W: Tensor) -> dict[str, Tensor]:
        found = {name: torch.zeros_like(t) if name in self.names else t for name, t in weights.items()}
        return found | {f"{self._name}.weight": W}

    def calibrate(
        self, model: nn.Module, clients: Iterable[tuple[Tensor, Tensor]], state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        """The weights of `model`, with W of all clients' sums and of those kept; what to keep; and the bytes that a
        client sends for it."""
        classes, inputs = self._rows.shape
        G = torch.zeros(inputs, inputs, dtype=torch.float64, device=self._rows.device)
        S = torch.zeros(classes, inputs, dtype=torch.float64, device=self._rows.device)
        for x, y in clients:
            h = functional.normalize(_inputs_of(model, self._name, x).double(), dim=-1)
            G += h.T @ h
            S.index_add_(0, y, h)
        if GRAM in state:
            G, S = G + state[GRAM], S + state[SUMS]
        ridge = self._settings.ridge * G.trace() / inputs
        W = S @ torch.linalg.pinv(G + ridge * torch.eye(inputs, dtype=G.dtype, device=G.device), hermitian=True)
        kept = {GRAM: self._settings.kept * G, SUMS: self._settings.kept * S}
        sent = self._rows.element_size() * (inputs * (inputs + 1) // 2 + classes * inputs)
        return self._with(model.state_dict(), W.to(self._rows)), kept, sent


class _OnSphere(nn.Module):
    """A fixed linear layer that reads h / ‖h‖, with the names of the layer in whose place it stands."""

    def __init__(self, head: nn.Linear, rows: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows.clone(), requires_grad=False)
        self.bias = None if head.bias is None else nn.Parameter(torch.zeros_like(head.bias), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        return functional.linear(functional.normalize(h, dim=-1), self.weight)


def _last_linear(model: nn.Module, x: Tensor) -> tuple[str, nn.Linear]:
    """The layer whose output is the network's."""
    outputs: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}

    def after(name: str, module: nn.Module, x: Tensor, z: Tensor) -> None:
        outputs[name] = z

    with watching(model, layers, after=after), torch.no_grad():
        found = model(x)
    name = next((name for name, out in outputs.items() if out is found), "")
    if not name:
        raise InputError("a fixed head needs a network whose last layer is an nn.Linear, got another")
    return name, layers[name]


def _inputs_of(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """What a layer gets to see."""
    found: list[Tensor] = []

    def before(name: str, module: nn.Module, x: Tensor) -> None:
        found.append(x.detach())

    with watching(model, [name], before), torch.no_grad():
        for part in x.split(1000):
            model(part)
    return torch.cat(found)
