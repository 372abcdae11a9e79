"""Test examples that hashes choose."""

from __future__ import annotations

from maecho.lab.data.splits import drawn


def test_the_choice_is_fixed_and_does_not_depend_on_the_order() -> None:
    names = [f"picture {k}" for k in range(10)]
    chosen = {name for name, is_test in zip(names, drawn(names, 0.3, "seed"), strict=True) if is_test}
    assert chosen == {"picture 1", "picture 4", "picture 7"}
    again = {name for name, is_test in zip(names[::-1], drawn(names[::-1], 0.3, "seed"), strict=True) if is_test}
    assert again == chosen
    assert drawn(names, 0.3, "another seed") != drawn(names, 0.3, "seed")
    assert not any(drawn(names[:3], 0.3, "seed"))
    assert drawn([], 0.3, "seed") == []
