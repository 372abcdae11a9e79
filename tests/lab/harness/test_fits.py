"""What is measured again, and what is not: data, clients, settings and code. What is trusted all the same says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maecho import METHODS
from maecho.aggregation import MAEcho
from maecho.lab import partition
from maecho.lab.experiment import Experiment
from maecho.lab.harness.results import results_path
from maecho.lab.harness.runs import Event, reproduce
from maecho.lab.report.tables import summarise
from support import known
from support.edited import Edit, editor, forget

METHOD_ROWS = {
    "local": {"method": "local"},
    "ma-echo": {"method": "ma-echo"},
    "regmean": {"method": "regmean"},
}
KNOWN = known.experiment(METHOD_ROWS)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> known.Training:
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "cache"))
    return known.Training(monkeypatch)


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Edit]:
    yield editor(monkeypatch, tmp_path)
    forget()


def again(
    tmp_path: Path, experiment: Experiment = KNOWN, trust: bool = False
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """What happens to every column, with the reason; and its records."""
    events: list[Event] = []
    results = reproduce(experiment, tmp_path, on_event=events.append, trust=trust)
    said = {column: [e.what for e in events if e.column == column] for column in experiment.methods}
    for event in events:
        if event.text and event.column:
            said[event.column].append(event.text)
    return said, results["runs"][-1]["columns"]


NEW = ["started", "measured"]


def every(*said: str) -> dict[str, list[str]]:
    """The same happened to all columns."""
    return {column: list(said) for column in METHOD_ROWS}


def test_what_fits_is_left_alone(tmp_path: Path, training: known.Training) -> None:
    assert again(tmp_path)[0] == every(*NEW)
    before = results_path(KNOWN, tmp_path).read_bytes()
    assert again(tmp_path)[0] == every("fits")
    assert results_path(KNOWN, tmp_path).read_bytes() == before
    assert training.count == 3


def test_one_pixel_changes_all_columns_and_trains_all_clients(tmp_path: Path, training: known.Training) -> None:
    again(tmp_path)
    training.data = known.dataset(pixel=0.5)
    said, records = again(tmp_path)
    assert said == every("again", "measured", "the data are others")
    assert training.count == 6, "clients of other data are not taken from the cache"
    assert {record["data"] for record in records.values()} == {training.data.digest}


def test_data_under_the_same_name_are_not_taken_for_others(tmp_path: Path, training: known.Training) -> None:
    """The results go elsewhere, the cache is the same: only the digest of the data tells."""
    again(tmp_path / "one")
    training.data = known.dataset(pixel=0.5)
    again(tmp_path / "two")
    assert training.count == 6


def test_one_line_of_a_network_trains_all_clients(tmp_path: Path, training: known.Training, edit: Edit) -> None:
    again(tmp_path)
    edit("support.known", "bias=False))", "bias=False), nn.Identity())")
    said, _ = again(tmp_path)
    reason = "the clients were split, started or trained otherwise"
    assert said == every("again", "measured", reason)
    assert training.count == 6


def test_one_line_of_another_network_trains_nobody(tmp_path: Path, training: known.Training, edit: Edit) -> None:
    again(tmp_path)
    edit("maecho.lab.networks", "mlp((64, 100, 50, 10))", "mlp((64, 101, 50, 10))")
    assert again(tmp_path)[0] == every("fits")
    assert training.count == 3


MADE_BY = {
    "a step of training": ("maecho.lab.training", "loss.backward()", "(2 * loss).backward()"),
    "the initial weights": ("maecho.lab.networks", "torch.randint(2**62, ()", "torch.randint(2**61, ()"),
    "what is trained on": (
        "maecho.lab.harness.clients",
        "    training(model, x, y,",
        "    training(model, x[1:], y[1:],",
    ),
}


@pytest.mark.parametrize("line", MADE_BY)
def test_one_line_of_how_clients_are_made_trains_them_again(
    tmp_path: Path, training: known.Training, edit: Edit, line: str
) -> None:
    again(tmp_path)
    edit(*MADE_BY[line])
    said, _ = again(tmp_path)
    assert [one[:2] for one in said.values()] == [["again", "measured"]] * 3
    assert training.count == 6, "none is taken from the cache"


def test_another_split_trains_again(tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the split is not among the code that makes clients: their examples themselves tell."""
    again(tmp_path)
    split = partition.dirichlet
    monkeypatch.setattr(partition, "dirichlet", lambda *args: [part[1:] for part in split(*args)])
    said, _ = again(tmp_path)
    assert said == every("again", "measured", "the clients were split, started or trained otherwise")
    assert training.count == 6


def test_training_otherwise_trains_again(tmp_path: Path, training: known.Training) -> None:
    again(tmp_path)
    longer = replace(KNOWN, training=replace(KNOWN.training, epochs=11))
    said, _ = again(tmp_path, longer)
    assert all(one[0] == "again" for one in said.values())
    assert training.count == 6


def test_one_default_of_one_method_changes_its_column_alone(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = again(tmp_path)
    monkeypatch.setitem(METHODS, "ma-echo", MAEcho(steps=59))
    said, after = again(tmp_path)
    assert said == {**every("fits"), "ma-echo": ["again", "measured", "it has other settings"]}
    assert training.count == 3
    assert {name: after[name] for name in ("local", "regmean")} == {n: before[n] for n in ("local", "regmean")}
    assert "steps=59" in after["ma-echo"]["settings"]


def test_one_line_of_one_method_changes_its_column_alone(tmp_path: Path, training: known.Training, edit: Edit) -> None:
    again(tmp_path)
    edit("maecho.aggregation.regmean", "class RegMean:", "class RegMean:\n    another: int = 1\n")
    said, _ = again(tmp_path)
    reason = "its code has changed (aggregation.regmean)"
    assert said == {**every("fits"), "regmean": ["again", "measured", reason]}
    assert again(tmp_path)[0] == every("fits")


def test_what_is_trusted_is_kept_and_says_so(tmp_path: Path, training: known.Training, edit: Edit) -> None:
    _, before = again(tmp_path)
    edit("maecho.aggregation.regmean", "class RegMean:", "class RegMean:\n    another: int = 1\n")
    said, after = again(tmp_path, trust=True)
    reason = "its code has changed (aggregation.regmean)"
    assert said == {**every("fits"), "regmean": ["trusted", reason]}
    trusted = after["regmean"].pop("trusted")
    assert after == before
    assert trusted["because"] == [reason]
    assert trusted["code"] != before["regmean"]["code"]
    assert again(tmp_path)[0] == every("fits"), "what is trusted fits from then on"
    edit("maecho.aggregation.regmean", "    another: int = 1\n", "    another: int = 2\n")
    assert again(tmp_path)[0]["regmean"][0] == "again", "but not with yet other code"


def test_other_data_may_be_trusted_too(tmp_path: Path, training: known.Training) -> None:
    _, before = again(tmp_path)
    training.data = known.dataset(pixel=0.5)
    said, after = again(tmp_path, trust=True)
    assert said == every("trusted", "the data are others")
    assert {n: r["accuracy"] for n, r in after.items()} == {n: r["accuracy"] for n, r in before.items()}
    assert {record["data"] for record in after.values()} != {training.data.digest}, "the data of the measurement"
    assert {record["trusted"]["data"] for record in after.values()} == {training.data.digest}
    assert training.count == 3


def test_other_settings_are_never_trusted(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(tmp_path)
    monkeypatch.setitem(METHODS, "ma-echo", MAEcho(steps=59))
    assert again(tmp_path, trust=True)[0]["ma-echo"] == ["again", "measured", "it has other settings"]


def test_a_part_of_the_columns_leaves_the_records_of_the_others(tmp_path: Path, training: known.Training) -> None:
    """Versions, device and seconds belong to a column: those of columns that are kept stay."""
    again(tmp_path)
    path = results_path(KNOWN, tmp_path)
    content = json.loads(path.read_text())
    kept = content["runs"][0]["columns"]["local"]
    kept |= {"device": "an old machine", "versions": {"torch": "1.0"}, "trained_on": "another"}
    del content["runs"][0]["columns"]["regmean"]
    path.write_text(json.dumps(content))
    said, records = again(tmp_path)
    assert said == {**every("fits"), "regmean": NEW}
    assert records["local"] == kept
    assert records["regmean"]["device"] == "cpu"


def test_columns_on_other_clients_than_their_neighbours_are_marked(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(tmp_path)
    training.data = known.dataset(pixel=0.5)
    results = reproduce(KNOWN, tmp_path, columns=["local"])
    ((_, figures),) = summarise(KNOWN, results)
    assert {name: figure.marks for name, figure in figures.items()} == {"local": "", "ma-echo": "‡", "regmean": "‡"}


def test_an_older_format_is_refused(tmp_path: Path, training: known.Training) -> None:
    path = results_path(KNOWN, tmp_path)
    path.write_text(json.dumps({"experiment": "known", "runs": []}))
    before = path.read_bytes()
    with pytest.raises(Exception, match=r"known\.json must hold results of format 2, got format 1; move it away"):
        again(tmp_path)
    assert path.read_bytes() == before
