"""Where tensors are worked on: a device of this machine, by its name."""

from __future__ import annotations

import torch

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
