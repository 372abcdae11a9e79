"""Seeds torch's global generators for a while. Dropout and initial weights accept no other generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def global_seed(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Inside, the global generators start from this seed. Afterwards they are as they were before."""
    on_gpu = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
