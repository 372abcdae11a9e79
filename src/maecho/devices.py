"""Finds a device of this machine by its name."""

from __future__ import annotations

import torch

from maecho.errors import InputError

Device = str | torch.device


def find(device: Device, dtype: torch.dtype = torch.float64) -> torch.device:
    """The device of this name. Raises InputError unless it exists and supports this dtype (Apple's GPUs lack
    float64)."""
    try:
        probe = torch.ones((), dtype=dtype, device=device)
        probe.item()  # "meta" is a device without values
    except Exception as error:  # every backend of torch raises its own kind of error
        raise InputError(f"device must be cpu, or cuda where torch sees a GPU, got {str(device)!r}") from error
    return probe.device
