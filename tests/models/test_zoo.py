"""Networks that people bring: one client alone comes back, and so do twins. What cannot be merged is refused or named.

A network that waits for something says so in its entry; such a check is a strict xfail, which fails once it holds.
"""

from __future__ import annotations

import pytest

from support.zoo import ZOO
from support.zoo.checks import KINDS, METHODS, accuracy, case, complaint

CHECKS = [f"{kind}: {method}" for kind in KINDS for method in METHODS]
SLOW = {"BART", "EfficientNet", "PoolFormer", "RegNet", "SegFormer", "Swin", "T5", "Wav2Vec2"}
"""Networks of many layers."""

pytestmark = [
    # torch says so of its own gradients, one example at a time.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # torch.jit, which torch itself uses when it compiles.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def parameters() -> list[object]:
    found = []
    for name, entry in ZOO.items():
        for check in CHECKS:
            reason = entry.waits_for.get(check) or entry.waits_for.get("*")
            marks = [pytest.mark.slow] if name in SLOW else []
            marks += [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            found.append(pytest.param(name, check, marks=marks, id=f"{name}, {check}"))
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in ZOO])
def test_it_has_learned(name: str) -> None:
    of = case(name)
    assert accuracy(of.entry, of.model) > 0.45, "four classes"


@pytest.mark.parametrize(("name", "check"), parameters())
def test_it_comes_back(name: str, check: str) -> None:
    kind, method = check.split(": ")
    of = case(name)
    assert complaint(of, of.outcome(method, KINDS[kind]), kind) is None
