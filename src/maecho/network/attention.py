"""Keeps torch's transformer layers on the path on which they call their modules.

How nn.MultiheadAttention is split into plain layers: see `packed/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from maecho.devices import Switched


def _no_fast_path() -> Callable[[], None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


slow_path = Switched(_no_fast_path)
"""Inside, torch's transformer layers call their modules. Otherwise one fused function may do the work without them."""
