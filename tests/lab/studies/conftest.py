"""Fixtures: a cache that is empty, and a config of a study in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


CONFIG = """
title = "Mine"
study = "partitions"
seeds = [0, 1]

[settings]
data = "digits"
clients = 3
betas = [0.1, 20]

[document]
order = 1
text = "What I wanted to know."

[quick]
seeds = [5]
settings = { clients = 2 }
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG)
    return path
