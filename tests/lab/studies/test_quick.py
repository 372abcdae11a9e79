"""Every config of a study runs with --quick. Here its models are trained for only one epoch."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from maecho.lab import charts, experiment
from maecho.lab.studies.config import Study
from maecho.lab.studies.runs import reproduce_study

STUDIES = [name for name in experiment.every_name() if experiment.is_study(name)]


def test_there_is_one_for_every_figure_and_proposition() -> None:
    assert STUDIES == [
        "figure-2", "figure-4", "figure-5", "figure-6a", "figure-8", "figure-9-cifar10",
        "figure-9-many-one-class", "figure-9-many-two-classes", "figure-9-one-class", "figure-9-two-classes",
        "figure-9-writers", "proposition-1", "proposition-2",
    ]  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_quickly(name: str, tmp_path: Path) -> None:
    quick = Study.load(name, quick=True)
    changes = {
        field.name: replace(getattr(quick.question, field.name), epochs=1)
        for field in dataclasses.fields(quick.question)  # type: ignore[arg-type]
        if field.name in ("training", "reading")
    }
    quick = replace(quick, question=replace(quick.question, **changes))  # type: ignore[type-var]
    told: list[float] = []
    results = reproduce_study(quick, tmp_path, on_event=lambda seed, share, text: told.append(share))
    assert told == sorted(told), "progress never goes back"
    assert 0 <= told[0] <= told[-1] <= 1
    assert (tmp_path / f"{name}-quick.json").exists()
    (run,) = results["runs"]
    assert run["numbers"]
    full = Study.load(name)
    assert full.document.text, "docs/results.md says what it is"
    assert {type(charts.read(one)) for one in run["charts"]} <= set(charts.KINDS.values())
    assert run["charts"]
