"""Scales: from numbers to places on a picture, and where an axis has its ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "log", "error"]
"""`error` is for accuracies in per cent, by the logarithm of the error: 80 is as far from 90 as 90 from 95."""

ACCURACIES = (0, 30, 50, 70, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9)
LEAST_ERROR = 0.02
"""An error of 0 has no logarithm."""
MARGIN = 0.04
"""Free room at both ends, as a share of the scale."""


@dataclass(frozen=True)
class Scale:
    """Takes numbers from `low` to `high` to places from `start` to `end`."""

    kind: Kind
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, kind: Kind = "linear") -> Scale:
        """A scale that shows all these values. Without any it shows 0 to 1."""
        usable = [value for value in values if value > 0] if kind == "log" else list(values)
        low, high = (min(usable), max(usable)) if usable else (1, 10) if kind == "log" else (0, 1)
        if low == high:
            low, high = (low / 2, high * 2) if kind == "log" else (low - 1, high + 1)
        return cls(kind, low, high, start, end)

    def __call__(self, value: float) -> float:
        low, high = self._warp(self.low), self._warp(self.high)
        share = (self._warp(value) - low) / (high - low)
        return self.start + (MARGIN + (1 - 2 * MARGIN) * share) * (self.end - self.start)

    def _warp(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, self.low * 1e-3 if self.low > 0 else 1e-12))
        return -math.log10(max(100 - value, LEAST_ERROR)) if self.kind == "error" else value

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers within the scale."""
        if self.kind == "error":
            inside = [float(one) for one in ACCURACIES if self.low <= one <= self.high]
            return inside if len(inside) > 1 else _round_steps(self.low, self.high, most)
        if self.kind == "log":
            return _decades(self.low, self.high, most)
        return _round_steps(self.low, self.high, most)


def _round_steps(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 times these where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for leading in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**k for k in powers for m in leading if low <= m * 10.0**k <= high]
        if len(found) <= most + 1:
            return found if len(found) > 1 else _round_steps(low, high, most)
    every = math.ceil(len(found) / most)
    return found[::every]


def short(value: float) -> str:
    """A number as a tick has it, e.g. 0.05, 20, 1e-06."""
    return f"{value:.4g}" if value else "0"
