"""Where tensors are worked on, and how finely: devices of this machine by name, and dtypes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from maecho.errors import InputError

Device = str | torch.device


def find(device: Device, dtype: torch.dtype = torch.float64) -> torch.device:
    """The device of this name. Raises InputError unless it is there and holds this dtype (Apple's GPUs: no float64)."""
    try:
        probe = torch.ones((), dtype=dtype, device=device)
        probe.item()  # "meta" is a device without values
    except Exception as error:  # each of torch's backends has its own way of not being there
        raise InputError(f"device must be cpu, or cuda where torch sees a GPU, got {str(device)!r}") from error
    return probe.device


def float32_or_finer(tensors: Iterable[Tensor]) -> torch.dtype:
    """float32, or the dtype that holds all real numbers among these tensors where that is finer."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype) if tensor.is_floating_point() else dtype
    return dtype
