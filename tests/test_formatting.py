"""Sizes and tables as text."""

from __future__ import annotations

import pytest

from maecho.formatting import markdown_table, size


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1499.6, "1.5 kB"), (1_658_400, "1.7 MB"), (2.5e9, "2.5 GB")],
)
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


def test_a_markdown_table() -> None:
    found = markdown_table(("a", "b|c"), [[1, None], ["x|y", 2.5]])
    assert found.splitlines() == ["| a | b\\|c |", "|---|---|", "| 1 |  |", "| x\\|y | 2.5 |"]
    assert markdown_table(["alone"], []) == "| alone |\n|---|"
