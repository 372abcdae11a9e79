"""Reads JSON from untrusted sources into plain values, and plain values into dataclasses with checked types.

No other file uses msgspec.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

from maecho.errors import shorten

T = TypeVar("T")

DEEPEST = 32
"""How deep lists and dictionaries may be nested. The parser calls itself once for each level."""

# A JSON string up to its closing quote, or up to the end of the text. It matches at every quote, so a scan takes
# linear time.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}]")


def parse(raw: bytes) -> Any:
    """Parse JSON as RFC 8259 defines it, without NaN and infinity.

    Raises ValueError, with the reason, also for a key that stands twice, deep nesting, and whole numbers of more than
    64 bits.
    """
    text = raw.decode("utf-8")
    _check_depth(text)
    return json.loads(text, object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant)


def convert(content: Any, kind: type[T]) -> T:
    """Convert plain values to this dataclass or other annotated type. Raises ValueError where a type does not fit;
    nothing is coerced."""
    import msgspec

    return msgspec.convert(content, kind)


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in _BRACKETS.finditer(_STRING.sub("", text)):
        depth += 1 if bracket.group() in "[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"lists nested more than {DEEPEST} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} twice")
        found[key] = value
    return found


def _int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"the number {shorten(text, 60)}, which is too large")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {shorten(text, 60)}, which is too large")
    return number


def _constant(text: str) -> float:
    raise ValueError(f"{text}, which is not JSON")
