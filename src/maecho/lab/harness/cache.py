"""The folder that keeps results of long computations, and the hashes that are their names there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import nn


def weights_digest(model: nn.Module) -> str:
    """A digest of all weights, bit for bit."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def cache_folder() -> Path:
    return Path(os.environ.get("MAECHO_CACHE") or Path.home() / ".cache" / "maecho")


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
