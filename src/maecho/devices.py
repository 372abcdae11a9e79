"""Finds a device of this machine by its name or by what lies there, and the dtype to work in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from maecho.errors import InputError

Device = str | torch.device
P = ParamSpec("P")
T = TypeVar("T")


def find(device: Device, dtype: torch.dtype = torch.float64) -> torch.device:
    """The device of this name. Raises InputError unless it exists and supports this dtype (Apple's GPUs lack
    float64)."""
    try:
        probe = torch.ones((), dtype=dtype, device=device)
        probe.item()  # "meta" is a device without values
    except Exception as error:  # every backend of torch raises its own kind of error
        raise InputError(f"device must be cpu, or cuda where torch sees a GPU, got {str(device)!r}") from error
    return probe.device


def of(model: nn.Module) -> torch.device:
    """The device of a model: that of its first parameter. A model without parameters is on the CPU."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def double(tensor: Tensor) -> Tensor:
    """The tensor in float64. Apple's GPUs have none, so tensors from there go to the CPU."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """A function that may be called in torch.inference_mode(): inside, tensors are plain and have gradients again."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return called


def cast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model itself, moved to a device, with its real numbers in another dtype. Complex ones stay as they are."""
    for module in model.to(device).modules():
        for p in module.parameters(recurse=False):
            p.data = p.data.to(dtype) if p.is_floating_point() else p.data
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module.register_buffer(name, buffer.to(dtype), name not in module._non_persistent_buffers_set)
    return model


def float32_or_finer(tensors: Iterable[Tensor]) -> torch.dtype:
    """float32, or the dtype that holds all real numbers among these tensors where that is finer."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype) if tensor.is_floating_point() else dtype
    return dtype
