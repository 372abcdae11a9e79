"""The page of a demo says what the demo has measured, and is recognised by the next demo."""

from __future__ import annotations

import pytest

from maecho.lab.demo import Demo, Row
from maecho.lab.report.page import demo as pages
from maecho.lab.report.page.document import maker_of
from support.pages import Node, parse

EVIL = "<img src=x>"
DEMO = Demo(
    uploads=("out/client-0.safetensors", f"out/{EVIL}"),
    upload_bytes=(1_500_000, 20),
    class_counts=((3, 0, 1000), (0, 7, 0)),
    rows=(
        Row("local (mean)", 0.25, 0.0, None, (0.5, 0.25, 0.0)),
        Row("fedavg", 0.5, 0.125, f"out/{EVIL}", (1.0, 0.5, 0.0)),
    ),
)


@pytest.fixture
def text() -> str:
    return pages.page(DEMO, f"maecho demo {EVIL}")


@pytest.fixture
def tree(text: str) -> Node:
    return parse(text)


def rows(table: Node) -> list[list[str]]:
    return [[cell.text for cell in row.all("th") + row.all("td")] for row in table.one("tbody").all("tr")]


def test_it_says_what_was_measured(tree: Node) -> None:
    clients, models = tree.all("section")
    counts, files = clients.all("table")
    assert rows(counts) == [["0", "3", "0", "1000"], ["1", "0", "7", "0"]]
    assert rows(files) == [["client-0.safetensors", "1,003", "2", "1.5 MB"], [EVIL, "7", "1", "20 bytes"]]
    accuracies, curves, seconds, per_class = models.all("table")
    assert rows(accuracies) == [
        ["local (mean)", "25.00 %", "25 %", "", ""],
        ["fedavg", "50.00 %", "50 %", "0.125", EVIL],
    ]
    assert [one.attributes["value"] for one in accuracies.all("meter")] == ["0.2500", "0.5000"]
    assert rows(curves)[0] == ["local (mean)", "0", "50"]
    assert rows(seconds) == [["fedavg", "0.125", "50"]]
    assert rows(per_class) == [["local (mean)", "50", "25", "0"], ["fedavg", "100", "50", "0"]]
    assert not tree.all("img")


def test_it_says_who_made_it(text: str) -> None:
    assert maker_of(text[:4096]) == pages.MAKER
    assert maker_of("<!doctype html>") is None
