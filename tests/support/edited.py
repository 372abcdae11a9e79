"""Changes a line of a module, as far as the identity of code is concerned. Nothing that runs changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from maecho.lab.harness import code

Edit = Callable[[str, str, str], None]
"""Module, old text, new text."""


def editor(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Edit:
    """A function that makes the identity of code see a module with another text."""
    found = code._source
    others: dict[str, Path] = {}

    def source(name: str) -> Path | None:
        return others.get(name) or found(name)

    def edit(name: str, old: str, new: str) -> None:
        path = source(name)
        assert path is not None, name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        others[name] = folder / f"{len(others)}-{name}.py"
        others[name].write_text(text.replace(old, new), encoding="utf-8")
        forget()

    def forget() -> None:
        code._module.cache_clear()
        code._code.cache_clear()

    monkeypatch.setattr(code, "_source", source)
    return edit


def forget() -> None:
    """After a test: what is known of changed modules is no longer true."""
    code._module.cache_clear()
    code._code.cache_clear()
