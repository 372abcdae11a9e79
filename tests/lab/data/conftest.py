"""Fixtures for data sets: files of one's own, and checksums that fit them."""

from __future__ import annotations

import pytest


@pytest.fixture
def own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files that are not the known ones."""
    monkeypatch.setenv("MAECHO_DATA_UNCHECKED", "1")


@pytest.fixture
def known_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, whatever the environment of the tests."""
    monkeypatch.delenv("MAECHO_DATA_UNCHECKED", raising=False)
