"""Runs of a study are written seed by seed, not repeated, and repeated when they do not fit any more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maecho import InputError
from maecho.lab import charts, data
from maecho.lab.charts import Lines
from maecho.lab.harness.code import Code
from maecho.lab.report.findings import Finding, findings, findings_markdown, short
from maecho.lab.studies import runs
from maecho.lab.studies.config import Study
from maecho.lab.studies.found import Found, Task
from maecho.lab.studies.partitions import Partitions
from maecho.lab.studies.runs import reproduce_study


@pytest.fixture
def study(config: Path) -> Study:
    return Study.load(str(config))


def test_a_run_says_all_about_itself(study: Study, tmp_path: Path) -> None:
    said: list[tuple[int, float, str]] = []
    results = reproduce_study(study, tmp_path, on_event=lambda *event: said.append(event))
    assert json.loads((tmp_path / "mine.json").read_text()) == results
    assert {key: results[key] for key in ("study", "title", "format", "quick", "text")} == {
        "study": "mine", "title": "Mine", "format": 2, "quick": False, "text": "What I wanted to know.",
    }  # fmt: skip
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    for run in results["runs"]:
        assert run["settings"] == {"study": "Partitions", "data": "digits", "clients": 3, "betas": [0.1, 20.0]}
        assert run["data"] == data.digits().digest
        assert run["device"] == "cpu"
        assert run["versions"].keys() >= {"maecho", "torch", "numpy", "python"}
        assert run["seconds"] > 0
        assert results["code"] == {run["code"]: dict(Code.of(Partitions).modules)}
        assert len(run["numbers"]) == 4
        assert [charts.read(chart).title for chart in run["charts"]] == ["β = 0.1", "β = 20"]
    assert [event for event in said if event[1] in (0.0, 1.0) and "β" not in event[2]] == [
        (0, 0.0, "starts"), (0, 1.0, "is done"), (1, 0.0, "starts"), (1, 1.0, "is done"),
    ]  # fmt: skip


class Counted:
    """A study that counts its runs and may be interrupted before a seed."""

    def __init__(self, stop_at: int | None = None):
        self.seeds: list[int] = []
        self.stop_at = stop_at

    def __call__(self, question: Partitions, task: Task) -> Found:
        if task.seed == self.stop_at:
            raise KeyboardInterrupt
        self.seeds.append(task.seed)
        return Found({"seed": task.seed, "third": 1 / 3}, [Lines("a", "x", "y", {"b": [[0.0, 1.0]]})])


def test_numbers_are_short_and_stand_in_rows(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of numbers take a line each; words that look like numbers stay as they are."""
    points = [[0.0, 1 / 3], [1e-12, -2e30]]
    found = Found({"a": 1 / 3}, [Lines("[1,\n 2]", "[1,  2]", "y", {"[]": points})])
    monkeypatch.setattr(Partitions, "__call__", lambda *given: found)
    results = reproduce_study(study, tmp_path)
    text = (tmp_path / "mine.json").read_text()
    assert json.loads(text) == results
    assert results["runs"][0]["numbers"] == {"a": 0.333333}
    (chart,) = results["runs"][0]["charts"]
    assert chart == {
        "kind": "lines", "title": "[1,\n 2]", "x": "[1,  2]", "y": "y",
        "series": {"[]": [[0.0, 0.333333], [1e-12, -2e30]]}, "levels": {},
    }  # fmt: skip
    assert "[1e-12, -2e+30]\n" in text


def test_a_kill_loses_one_seed(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Counted(stop_at=1), Counted()
    monkeypatch.setattr(Partitions, "__call__", lambda *given: first(*given))
    with pytest.raises(KeyboardInterrupt):
        reproduce_study(study, tmp_path)
    monkeypatch.setattr(Partitions, "__call__", lambda *given: second(*given))
    results = reproduce_study(study, tmp_path)
    assert (first.seeds, second.seeds) == ([0], [1])
    assert [run["numbers"] for run in results["runs"]] == [
        {"seed": 0.0, "third": 0.333333}, {"seed": 1.0, "third": 0.333333},
    ]  # fmt: skip
    reproduce_study(study, tmp_path)
    assert second.seeds == [1], "what is there and fits is not run again"


def test_a_run_that_does_not_fit_is_run_again(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr(Partitions, "__call__", lambda *given: counted(*given))
    said: list[str] = []

    def run(one: Study, trust: bool = False) -> dict[str, Any]:
        counted.seeds.clear()
        said.clear()
        return reproduce_study(one, tmp_path, on_event=lambda seed, share, text: said.append(text), trust=trust)

    run(study)
    other = replace(study, question=Partitions("digits", 4, (0.1,)))
    run(other)
    assert counted.seeds == [0, 1]
    assert said[0] == "is run again, since it has other settings"
    run(replace(other, seeds=(1, 7)))
    assert counted.seeds == [7], "runs of other seeds stay"
    monkeypatch.setattr(runs.Code, "of", lambda *roots: Code("new", {"maecho.lab.partition": "new"}))
    results = run(other, trust=True)
    assert counted.seeds == []
    assert said[0].startswith("is kept as it is, though its code has changed (lab.charts, ")
    assert results["runs"][0]["trusted"]["code"] == "new"
    run(other)
    assert counted.seeds == [], "it is trusted from then on"
    run(replace(other, question=study.question), trust=True)
    assert counted.seeds == [0, 1], "other settings are not trusted"


@pytest.mark.parametrize("damage", ["cut", "format", "number", "chart", "seed"])
def test_damaged_results_stay_as_they_are(study: Study, tmp_path: Path, damage: str) -> None:
    results = reproduce_study(study, tmp_path)
    path = tmp_path / "mine.json"
    changes: dict[str, dict[str, Any]] = {
        "number": {"numbers": {"a": "much"}},
        "chart": {"charts": [{"kind": "pie"}]},
        "seed": {"seed": None},
    }
    damaged = {
        **results,
        "format": 1 if damage == "format" else 2,
        "runs": [{**results["runs"][0], **changes.get(damage, {})}],
    }
    text = json.dumps(damaged)
    text = text[:-20] if damage == "cut" else text
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        reproduce_study(study, tmp_path)
    assert f"{path} must hold results of mine, got something else; move it away" in str(caught.value)
    assert path.read_text() == text


def test_numbers_over_seeds(study: Study) -> None:
    several = [{"seed": seed, "numbers": {"a": seed + 0.25, "b": 1e-9}} for seed in (0, 1, 2)]
    results = {"runs": several}
    assert findings(study, results) == [Finding("a", 0.75, 0.25, 1.25), Finding("b", 1e-9, 1e-9, 1e-9)]
    assert findings_markdown(study, results).splitlines() == [
        "| what was measured | mean of 2 seeds | range |",
        "|---|---|---|",
        "| a | 0.75 | 0.25 to 1.25 |",
        "| b | 1e-09 |  |",
    ]
    names = {"n": 3, "a: x": 1.0, "a: y": 0.0, "b: x": 3.0, "b: z, w: v": 5}
    crossed = [{"seed": seed, "numbers": {**names, "a: y": 2 + seed}} for seed in (0, 1)]
    assert findings_markdown(study, {"runs": crossed}).splitlines() == [
        "| what was measured | mean of 2 seeds | range |",
        "|---|---|---|",
        "| n | 3 |  |",
        "",
        "| mean of 2 seeds | x | y | z, w: v |",
        "|---|---|---|---|",
        "| a | 1 | 2.5 (2 to 3) |  |",
        "| b | 3 |  | 5 |",
    ]
    apart = {"runs": [{"seed": 0, "numbers": {"a: x": 1.0, "b: y": 2}}]}
    assert findings_markdown(study, apart).splitlines()[2:] == ["| a: x | 1 |  |", "| b: y | 2 |  |"]
    assert [short(number) for number in (97.8612, 0.0012345, 100.0, 0.0)] == ["97.86", "0.001234", "100", "0"]
