"""Fixtures: the page of the committed results, made once, and read as a tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from maecho.lab import experiment
from maecho.lab.report.page.collected import Measured, Study, collect
from maecho.lab.report.page.report import page
from support import hostile
from support.pages import Node, parse


@pytest.fixture(scope="package")
def committed() -> tuple[list[Measured], list[Study]]:
    return collect(experiment.folder() / "results")


@pytest.fixture(scope="package")
def text(committed: tuple[list[Measured], list[Study]]) -> str:
    return page(*committed)


@pytest.fixture(scope="package")
def tree(text: str) -> Node:
    return parse(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Hostile results."""
    return hostile.write(tmp_path)
