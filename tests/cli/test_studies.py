"""`maecho reproduce` with a study."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maecho.lab import experiment

Run = Callable[..., Any]

STUDY = """
title = "Mine"
study = "partitions"
seeds = [0, 1]

[settings]
data = "digits"
clients = 3
betas = [0.1]

[quick]
seeds = [0]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    return path


def test_a_study_of_the_paper(run: Run, tmp_path: Path) -> None:
    found = run(f"reproduce figure-2 --quick --out {tmp_path}")
    assert found.code == 0, found.err
    # Lines break where the terminal ends.
    said = " ".join(found.out.split())
    assert "Figure 2: how the classes are shared out (quick: small data instead of the paper's)" in said
    written = json.loads((tmp_path / "figure-2-quick.json").read_text())
    assert len(written["runs"]) == 1
    for name in written["runs"][0]["numbers"]:
        assert name in found.out
    assert run(f"reproduce figure-2 --quick --out {tmp_path} --show --json").json == written


def test_its_numbers_as_a_table(run: Run, config: Path, tmp_path: Path) -> None:
    lines = run(f"reproduce {config} --markdown --out {tmp_path}").out.splitlines()
    assert lines[0] == "| what was measured | mean of 2 seeds | range |"
    assert len(lines) == 4


@pytest.mark.parametrize("option", ["--columns local", "--picture a.svg"])
def test_what_a_study_has_not(run: Run, config: Path, option: str) -> None:
    found = run(f"reproduce {config} {option}")
    assert found.code == 2
    assert f"{option.split()[0]} must come with a table of accuracies, got the study mine" in found.err


def test_tables_and_studies_together(run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --all too, a study whose data are missing is named at the end."""
    (tmp_path / "other.toml").write_text(STUDY.replace('"digits"', '"mnist"'))
    monkeypatch.setattr(experiment, "folder", lambda: tmp_path)
    monkeypatch.setenv("MAECHO_DATA", str(tmp_path / "empty"))
    found = run(f"reproduce --all --out {tmp_path / 'new'}")
    assert [path.name for path in (tmp_path / "new").glob("*.json")] == ["mine.json"]
    assert found.code == 2
    assert "1 of 2 are reproduced, got no data for other (mnist: " in found.err


def test_mistakes_are_one_sentence(run: Run, config: Path) -> None:
    for right, wrong, part in (
        ("clients", "client", "mistake at settings: 'client', known are data, clients, betas"),
        ('"partitions"', '"partition"', "mistake at study: must be one of partitions"),
    ):
        config.write_text(STUDY.replace(right, wrong))
        found = run(f"reproduce {config}")
        assert found.code == 2
        assert part in " ".join(found.err.split())
        assert "Traceback" not in found.err
