"""Keeps torch's transformer layers on the path on which they call their modules.

How nn.MultiheadAttention is split into plain layers: see `packed/attention.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _SlowPath:
    """Counts who needs the slow path. The switch is one for the whole process, so the last one to leave puts it
    back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, torch's transformer layers call their modules. Otherwise one fused function may do the work
        without them."""
        with self._lock:
            if not self._inside:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    torch.backends.mha.set_fastpath_enabled(self._before)


slow_path = _SlowPath()
