"""Which examples are for the test where a data set does not say: by hashes, so on every machine the same."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def drawn(names: Sequence[str], share: float, seed: str) -> list[bool]:
    """True for this share of the names, rounded down: those with the smallest SHA-256 of seed and name."""
    order = sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
    chosen = set(order[: int(share * len(names))])
    return [name in chosen for name in names]
