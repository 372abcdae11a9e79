"""Makes a seed for every purpose, and seeds torch's global generators inside a `with` block.

Dropout and initial weights draw from the global generators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(purpose: str) -> int:
    """The seed for one purpose, 48 bits of a hash of the text. Seeds of different purposes have nothing in common."""
    return int(hashlib.sha256(purpose.encode()).hexdigest()[:12], 16)


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
