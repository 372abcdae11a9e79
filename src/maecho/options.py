"""Checks of hyper-parameters: what was expected and what came, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from maecho.errors import InputError


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def number(name: str, value: object, words: str, low: float, high: float = math.inf, whole: bool = False) -> None:
    """A finite number from `low` to `high`; `words` complete "… must be". Low itself is too low where words say so."""
    kind = int if whole else (int, float)
    fits = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not fits or (words == POSITIVE and value == 0):
        raise InputError(f"{name} must be {words}, got {value!r}")


POSITIVE = "positive and finite"
NOT_NEGATIVE = "at least 0 and finite"
