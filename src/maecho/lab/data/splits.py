"""Decides by hashes which examples are for the test, if a data set does not say. So every machine decides alike."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def drawn(names: Sequence[str], share: float, seed: str) -> list[bool]:
    """True for this share of the names, rounded down: those whose SHA-256 of seed and name is smallest."""
    order = sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
    chosen = set(order[: int(share * len(names))])
    return [name in chosen for name in names]
