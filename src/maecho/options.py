"""Checks hyper-parameters. Each error says in one sentence what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

from maecho.errors import InputError


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise InputError unless the value is one of the choices."""
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def number(name: str, value: object, words: str, low: float, high: float = math.inf, whole: bool = False) -> None:
    """Raise InputError unless the value is a finite number from `low` to `high`.

    `words` say so in the message: they complete "… must be". If they are POSITIVE, 0 is refused too.
    """
    kind = int if whole else (int, float)
    fits = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not fits or (words == POSITIVE and value == 0):
        raise InputError(f"{name} must be {words}, got {value!r}")


POSITIVE = "positive and finite"
NOT_NEGATIVE = "at least 0 and finite"
