"""Sums over examples of squared gradients, exactly.

The gradient of a matrix for one example is Σ_l δ_l x_lᵀ. The sum runs over the places l of the example (tokens or
patches; a plain row is one place). x_l is the row that came in, δ_l the gradient of the row that went out. So the
squares of a layer follow from its rows. If there is one place, Σ_n (δ_n x_nᵀ)² is a single product of squares. All
other parameters (of norms, free ones, a weight that is used outside of its module) go the long way: one gradient for
each example.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from maecho.network.batches.inputs import each, leaves, per_example, subset
from maecho.network.batches.reading import Read
from maecho.network.forward import call

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNK = 2**22
"""The most entries of gradients in memory at a time."""


def squares(
    x: Float[Tensor, "g n l d"],
    delta: Float[Tensor, "g n l o"],
    squared: Float[Tensor, "g n l d"] | None = None,
    summed: bool = True,
) -> tuple[Float[Tensor, "g o d"], Float[Tensor, "g o d"]]:
    """Σ_n (Σ_l δ_l x_lᵀ)², and the sum without squares, Σ_n Σ_l δ_l x_lᵀ. `squared` is x², if it is known.
    If not `summed`, that sum may be 0 instead."""
    if x.shape[2] == 1:
        squared = x.square() if squared is None else squared
        x, delta, squared = x.squeeze(2), delta.squeeze(2), squared.squeeze(2)
        found = delta.square().mT @ squared
        return found, delta.mT @ x if summed else torch.zeros_like(found)
    each = delta.mT @ x
    return each.square().sum(1), each.sum(1)


def token_squares(
    tokens: Int[Tensor, "n l"], delta: Float[Tensor, "n l o"], count: int, padding: int | None = None
) -> tuple[Float[Tensor, "1 o d"], Float[Tensor, "1 o d"]]:
    """The same for tokens, whose one-hot rows are not formed.

    The gradients of a token that occurs twice in an example are added before they are squared. `padding` is a token
    that gets no gradient.
    """
    n, out = len(tokens), delta.shape[-1]
    which = (tokens + count * torch.arange(n, device=tokens.device).unsqueeze(1)).flatten()
    pairs, place = which.unique(return_inverse=True)
    each = delta.new_zeros(len(pairs), out).index_add_(0, place, delta.reshape(-1, out))
    if padding is not None:
        each[pairs % count == padding] = 0  # nn.Embedding gives it no gradient
    sums = delta.new_zeros(2, count, out)
    for total, part in zip(sums, (each.square(), each), strict=True):
        total.index_add_(0, pairs % count, part)
    return sums[0].T.unsqueeze(0), sums[1].T.unsqueeze(0)


class LongWay:
    """Computes one gradient for each example. It works for every parameter.

    torch.func computes the gradients of all examples together. If it cannot follow the model, they are computed one
    after the other.
    """

    def __init__(self, model: nn.Module, device: torch.device, outputs: Read | None = None):
        self._model, self._device, self._outputs = model, device, outputs
        self._together = True

    def squares(self, x: Any, directions: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Σ of the squares of vᵀ ∂output/∂parameter over examples and directions v [n, outputs], by parameter name."""
        parameters = dict(self._model.named_parameters())
        chosen = {name: parameters[name].detach() for name in names}
        n = len(directions[0])
        entries = len(directions) * sum(p.numel() for p in chosen.values())
        sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in chosen.items()}
        for piece in torch.arange(n).split(max(1, CHUNK // max(1, entries))):
            inputs = subset(x, piece, n)
            V = torch.stack([v[piece.to(v.device)] for v in directions], dim=1)  # [examples, directions, outputs]
            for name, part in self._piece(inputs, V, chosen).items():
                sums[name] += part.cpu().double()
        return sums

    def _piece(self, x: Any, V: Tensor, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._together:
            try:
                return self._at_once(x, V, chosen)
            except (RuntimeError, ValueError, TypeError):
                self._together = False
        return self._one_by_one(x, V, chosen)

    def _at_once(self, x: Any, V: Tensor, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        which = [k for k, leaf in enumerate(leaves(x)) if per_example(leaf, len(V))]
        moving = [leaves(x)[k] for k in which]

        def one(inputs: list[Tensor], v: Tensor) -> dict[str, Tensor]:
            given = dict(zip(which, inputs, strict=True))
            places = itertools.count()
            single = each(x, lambda t: given[k].unsqueeze(0) if (k := next(places)) in given else t)

            def output(parameters: dict[str, Tensor]) -> Tensor:
                made: Tensor = call(
                    lambda *a, **k: functional_call(self._model, parameters, a, k),
                    single,
                    self._device,
                    self._outputs,
                )
                return made.squeeze(0)

            pull = vjp(output, dict(chosen))[1]
            (gradients,) = vmap(pull)(v)
            return {name: g.double().square().sum(0) for name, g in gradients.items()}

        with torch.no_grad(), warnings.catch_warnings():  # parameters that were not chosen need no gradients
            warnings.filterwarnings("ignore", ".*not yet implemented the batching rule")  # slower, and as right
            found = vmap(one, randomness="different")(moving, V)
        return {name: part.sum(0) for name, part in found.items()}

    def _one_by_one(self, x: Any, V: Tensor, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in chosen.items()}
        parameters = {name: p.requires_grad_() for name, p in chosen.items()}
        for i in range(len(V)):
            with torch.enable_grad():
                single = subset(x, torch.tensor([i]), len(V))
                output = call(
                    lambda *a, **k: functional_call(self._model, parameters, a, k), single, self._device, self._outputs
                )
            for v in V[i]:
                found = torch.autograd.grad(
                    output, list(parameters.values()), v.unsqueeze(0), retain_graph=True, allow_unused=True
                )
                for name, gradient in zip(parameters, found, strict=True):
                    if gradient is not None:
                        sums[name] += gradient.double().square()
        return sums
