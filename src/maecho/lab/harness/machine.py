"""Describes the machine of a measurement: the device, and the versions that numbers depend on."""

from __future__ import annotations

import platform

import numpy as np
import torch

from maecho._version import __version__
from maecho.errors import InputError


def machine(device: str) -> str:
    """The device in words, e.g. "cpu" or "NVIDIA H200"."""
    return device if device == "cpu" else torch.cuda.get_device_name(device)


def versions() -> dict[str, str]:
    return {
        "maecho": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def check(device: str) -> None:
    """Raise InputError unless this machine has the device."""
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise InputError(f"device must be cpu, or cuda where torch sees a GPU, got {device!r}")
