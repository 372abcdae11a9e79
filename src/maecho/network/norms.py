"""Normalisation layers as diagonal matrices: a group of one neuron for every feature.

A norm with learned scale and shift gives out γ x̂ + β for every feature: the matrix [γ β] times the row (x̂, 1).
BatchNorm also has a memory: its running mean and variance.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.network.layers import Layer

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
"""Every kind of BatchNorm. No other list of them exists."""


@singledispatch
def norm_rows(module: nn.Module, x: Tensor) -> Tensor:
    """The rows [features, n, 1] that the scale multiplies. For a BatchNorm they are its raw input, for other norms the
    normalised one."""
    raise TypeError(f"{type(module).__name__} is not known as a norm")


@norm_rows.register
def _(module: BatchNorm, x: Tensor) -> Tensor:
    return _channels_first(x)


@norm_rows.register
def _(module: nn.GroupNorm, x: Tensor) -> Tensor:
    return _channels_first(functional.group_norm(x, module.num_groups, eps=module.eps))


@norm_rows.register
def _(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return _features_last(functional.layer_norm(x, module.normalized_shape, eps=module.eps), module.weight)


@norm_rows.register
def _(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return _features_last(functional.rms_norm(x, list(module.normalized_shape), eps=module.eps), module.weight)


def norm_output_rows(module: nn.Module, z: Tensor) -> Tensor:
    """The output of a norm as rows, in the order of `norm_rows`."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return _features_last(z, module.weight)
    return _channels_first(z)


def _channels_first(x: Tensor) -> Tensor:
    return x.movedim(1, 0).reshape(x.shape[1], -1, 1)


def _features_last(x: Tensor, weight: Tensor) -> Tensor:
    return x.reshape(-1, weight.numel()).T.unsqueeze(-1)


def find(model: nn.Module) -> dict[str, Layer]:
    """Every norm that learns a scale and whose output for one example does not depend on the other examples."""
    found = {}
    for name, module in model.named_modules():
        if norm_rows.dispatch(type(module)) is norm_rows.dispatch(nn.Module):
            continue
        if getattr(module, "weight", None) is None:
            continue
        if isinstance(module, BatchNorm) and module.running_mean is None:
            continue
        prefix = f"{name}." if name else ""
        bias = f"{prefix}bias" if getattr(module, "bias", None) is not None else None
        found[name] = Layer(name, f"{prefix}weight", bias, groups=module.get_parameter("weight").numel())
    return found


def affine(module: nn.Module) -> tuple[Tensor, ...]:
    """The factor and, if the norm has a bias, the summand that a norm applies to its rows, in float64.

    The rows of a BatchNorm are its raw inputs x. Its factor a and summand c are those of a·x + c in evaluation mode.
    """
    state = {name: tensor.double().flatten() for name, tensor in module.state_dict().items()}
    if not isinstance(module, BatchNorm):
        return (state["weight"], state["bias"]) if "bias" in state else (state["weight"],)
    a = state["weight"] / torch.sqrt(state["running_var"] + epsilon(module))
    return a, state["bias"] - a * state["running_mean"]


def epsilon(module: nn.Module) -> float:
    return float(getattr(module, "eps"))  # noqa: B009 (mypy sees a tensor or a module here)
