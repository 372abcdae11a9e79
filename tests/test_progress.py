"""Progress bars: they appear after a while, on a terminal, for all long work, and never disturb the work."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import maecho
from maecho import progress
from maecho.echo.simulated import Drawing
from maecho.progress import track
from support.clients import batches
from support.clients import network as mlp


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Make bars appear at once, and give the text that a terminal shows."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(progress, "stderr", lambda: screen)
    monkeypatch.setattr(progress, "PATIENCE", -1.0)

    def text() -> str:
        assert isinstance(screen.file, io.StringIO)
        return screen.file.getvalue()

    return text


def test_items_come_through_and_are_counted(shown: Callable[[], str]) -> None:
    assert list(track([1, 2, 3], "three things", show=True)) == [1, 2, 3]
    assert "three things" in shown()
    assert "100%" in shown()


@pytest.mark.parametrize("show", [False, None])
def test_nothing_is_shown_unasked_or_where_there_is_no_terminal(show: bool | None, shown: Callable[[], str]) -> None:
    assert list(track(range(3), "three things", show=show)) == [0, 1, 2]
    assert shown() == ""


def test_short_work_stays_silent(shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    assert list(track(range(3), "three things", show=True)) == [0, 1, 2]
    assert "three things" not in shown()


def test_bars_inside_bars(shown: Callable[[], str]) -> None:
    found = [(i, k) for i in track("ab", "outer", show=True) for k in track("xy", "inner", show=True)]
    assert found == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    assert "outer" in shown()
    assert "inner" in shown()


def test_without_rich_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(track(range(3), "three things", show=True)) == [0, 1, 2]


def test_what_is_drawn_has_bars_too(shown: Callable[[], str]) -> None:
    pairs = [(mlp(seed), batches(seed)) for seed in (1, 2)]
    options: dict[str, Any] = {"rounds": 2, "drawing": Drawing(100, 20)}
    quiet = maecho.relay(mlp(), pairs, progress=False, **options)
    assert shown() == ""
    loud = maecho.relay(mlp(), pairs, progress=True, **options)
    assert all((quiet[name] == loud[name]).all() for name in quiet)
    for label in (
        "echo-chain, stage 1",
        "echo-chain, stage 2 of 3",
        "client 1",
        "features at 2",
        "echo-relay, stage 3",
    ):
        assert label in shown(), label
