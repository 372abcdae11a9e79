"""The table of known content in docs/data.md is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from maecho.formatting import markdown_table
from maecho.lab.data import DATASETS
from maecho.lab.data.known import KNOWN

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"


def table() -> str:
    rows = [
        [f"`{name}`", f"`{part}`", " x ".join(f"{length:,}" for length in known.shape), f"`{known.sha256}`"]
        for name, parts in KNOWN.items()
        for part, known in parts.items()
    ]
    return markdown_table(["data set", "part", "shape", "SHA-256"], rows)


def test_the_page_has_every_checksum() -> None:
    (found,) = re.findall(r"<!-- known: .* -->\n(.*)\n<!-- /known -->", PAGE.read_text(encoding="utf-8"), re.S)
    assert found == table()


def test_the_page_has_every_data_set() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in DATASETS if f"| `{name}` |" not in text] == []
