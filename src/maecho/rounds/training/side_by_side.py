"""Local training of all clients of a round at once. The result is that of `one_by_one`, up to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from maecho.rounds.training.local import Local
from maecho.rounds.training.span import InSpan, first_linear
from maecho.rounds.training.stack import Stack, Work

MIXING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.AlphaDropout, nn.RNNBase)
"""Modules that make examples depend on each other or on random numbers in training, or that torch.func cannot batch."""

IN_CACHE = 1_000_000
"""So many numbers, the weights of all clients together, stay in the cache of a CPU beside gradients and momentum."""


def why_not(model: nn.Module) -> str:
    """Why a network cannot be trained side by side; empty if nothing speaks against it."""
    for name, module in model.named_modules():
        if isinstance(module, MIXING) and getattr(module, "p", 1.0) != 0:
            return f"{name!r} is a {type(module).__name__}"
        if isinstance(module, nn.MultiheadAttention) and module.dropout:
            return f"{name!r} has dropout"
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:  # torch.func leaves such networks broken behind
            return f"{name!r} is tied to {first[id(parameter)]!r}"
    return ""


def worth_it(model: nn.Module, works: Sequence[Work]) -> bool:
    """Whether training together is likely faster: always on a GPU; on a CPU if there is less to compute, or if all
    weights stay in its cache. Measured by benchmarks/rounds.py."""
    weights = sum(p.numel() for p in model.parameters())
    small = weights * len(works) <= IN_CACHE
    return works[0].x.device.type != "cpu" or small or _in_span(model, works) is not None


def _in_span(model: nn.Module, works: Sequence[Work]) -> str | None:
    """The first layer, if its weights are better kept in the span of the clients' examples: where nobody has more
    examples than the layer has inputs."""
    layer = first_linear(model, works[0].x)
    if layer is None:
        return None
    inputs = int(model.get_submodule(layer).weight.shape[1])  # type: ignore[index]
    return layer if max(len(w.y) for w in works) <= inputs else None


def train_together(
    model: nn.Module, start: Mapping[str, Tensor], works: Sequence[Work], local: Local
) -> list[dict[str, Tensor]]:
    """Train every client from `start`. The results are state_dicts, in the order of `works`.

    All inputs must have the same shape but for the number of examples. `model` is a place to work in, and a network for
    which `why_not` says nothing.
    """
    order = sorted(range(len(works)), key=lambda i: -local.steps(len(works[i].y)))
    longest_first = [works[i] for i in order]
    layer = _in_span(model, works)
    if layer is not None and isinstance(model, nn.Sequential):
        stack: Stack = InSpan(model, layer, start, longest_first, local)
    else:
        stack = Stack(model, start, longest_first, local)
    stack.train()
    trained: list[dict[str, Tensor]] = [{}] * len(works)
    for place, i in enumerate(order):
        own = stack.weights(place)
        trained[i] = {name: own[name] if name in own else t.detach().clone() for name, t in start.items()}
    return trained
