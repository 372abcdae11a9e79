"""Finds a device of this machine by its name or by what lies there, and the precision to work in."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

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


class Switched:
    """A switch of the whole process, turned while anybody is inside. The last one to leave puts it back, also if uses
    overlap in several threads.

    Args:
        turn: turns it, and returns what puts it back.
    """

    def __init__(self, turn: Callable[[], Callable[[], None]]):
        self._turn = turn
        self._lock = threading.Lock()
        self._inside = 0
        self._back: Callable[[], None] = _nothing

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._back = self._turn()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._back()


def _nothing() -> None:
    pass


def _no_tf32() -> Callable[[], None]:
    before = _switches_of_tf32()
    for owner, name, _ in before:
        setattr(owner, name, "ieee" if name == "fp32_precision" else False)

    def back() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return back


def _switches_of_tf32() -> list[tuple[Any, str, Any]]:
    """The switches of torch that are on: owner, name, value. Since torch 2.9 they have other names; to use the older
    ones there brings warnings, and errors where a user has used the newer."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):
        found = [(owner, "fp32_precision") for owner in (cudnn.conv, cudnn.rnn, matmul)]
    else:
        found = [(owner, "allow_tf32") for owner in (cudnn, matmul)]
    values = ((owner, name, getattr(owner, name)) for owner, name in found)
    return [(owner, name, value) for owner, name, value in values if value in ("tf32", True)]


full_precision = Switched(_no_tf32)
"""Inside, products of float32 on a GPU are those of float32. Otherwise torch may round factors to TF32, which has 10
bits; of convolutions it does so by default. No comparison up to rounding stands that."""


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
