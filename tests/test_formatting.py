"""Sizes and tables as text."""

from __future__ import annotations

import pytest
import torch

from maecho.formatting import bytes_of, markdown_table, numbers, size


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1499.6, "1.5 kB"), (1_658_400, "1.7 MB"), (2.5e9, "2.5 GB")],
)
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("300000", 300_000),
        ("5 MB", 5e6),
        ("1.5GB", 1.5e9),
        (" 64 kB ", 64_000),
        ("2 KB", 2000),
        ("3 T", 3e12),
    ],
)
def test_sizes_as_people_write_them(text: str, number: float) -> None:
    assert bytes_of(text) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "3x", "1 EB", "5 M B", "1e6", ".5 MB", "9" * 19])
def test_other_texts_are_no_sizes(text: str) -> None:
    assert bytes_of(text) is None


def test_a_markdown_table() -> None:
    found = markdown_table(("a", "b|c"), [[1, None], ["x|y", 2.5]])
    assert found.splitlines() == ["| a | b\\|c |", "|---|---|", "| 1 |  |", "| x\\|y | 2.5 |"]
    assert markdown_table(["alone"], []) == "| alone |\n|---|"


def test_only_few_numbers_of_a_tensor_are_told() -> None:
    assert numbers(torch.tensor([1, 2])) == "[1, 2]"
    assert numbers(torch.tensor(0.5)) == "0.5"
    assert numbers(torch.ones(4, 5)).count("1.0") == 20
    assert numbers(torch.ones(3, 7)) == "torch.float32 of shape (3, 7)"
