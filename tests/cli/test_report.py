"""`maecho report`: what it writes, and that bad input overwrites nothing."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from maecho.lab.experiment import Experiment
from support import records
from support.configs import CONFIG
from support.pages import parse

Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(CONFIG)
    found = records.results(Experiment.load(str(tmp_path / "mine.toml")))
    for run in found["runs"]:
        run["partition"] = [[1, 0], [2, 3]]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine.json").write_text(json.dumps({**found, "experiment": "mine"}))
    return tmp_path


def test_a_page_and_its_pictures(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda link: opened.append(link) or True)
    said = run("report --results results --out new/page.html --figures drawn --open")
    assert said.code == 0, said.err
    assert "new/page.html" in said.out
    assert "1 pictures: drawn" in said.out
    assert opened == [(folder / "new" / "page.html").as_uri()]
    assert parse((folder / "new" / "page.html").read_text()).one("section", aria_labelledby="mine")
    (picture,) = (folder / "drawn").iterdir()
    assert picture.name == "mine-partition-2-clients-beta-0.5-same-init-seed-0.svg"
    ElementTree.parse(picture)
    monkeypatch.setattr(webbrowser, "open", lambda link: False)
    assert "No browser was found" in run("report --results results --out new/page.html --open --force").out


def test_by_default_it_shows_the_committed_results(folder: Path, run: Run) -> None:
    assert run("report").code == 0
    assert parse(Path("maecho-report.html").read_text()).one("section", aria_labelledby="table-1")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--results nowhere", "--results must be a folder, got nothing at nowhere"),
        ("--results mine.toml", "--results must be a folder, got a file at mine.toml"),
        ("--results empty", "empty must hold results as `maecho reproduce` writes them, got none"),
        ("--results half", "half/mine.json must hold results as JSON, got a text that is cut or damaged"),
        ("--results results --out page.html", "cannot write page.html: it must be a new file, got one that exists"),
        ("--results results --out results", "cannot write results: --out must name a regular file, got a folder"),
        ("--results results --out page.html --force --figures mine.toml", "--figures must be a folder, got a file at"),
        ("--results results --out other.html --figures drawn", "it must be a new file, got one that exists; --force"),
        ("--results half --out page.html --force", "half/mine.json must hold results as JSON"),
    ],
)  # fmt: skip
def test_bad_input_overwrites_nothing(folder: Path, run: Run, line: str, sentence: str) -> None:
    for name in ("empty", "half", "drawn"):
        Path(name).mkdir()
    Path("half/mine.json").write_text(Path("results/mine.json").read_text()[:-40])
    Path("page.html").write_text("mine")
    Path("drawn/mine-partition-2-clients-beta-0.5-same-init-seed-0.svg").write_text("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    said = run(f"report {line}")
    assert said.code == 2
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
