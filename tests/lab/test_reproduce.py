"""The experiment harness repeats no run, uses no outdated result, and shows the paper's figures beside ours."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maecho import METHODS, InputError, make_upload, relay
from maecho.aggregation import MAEcho
from maecho.lab import data, experiment, networks
from maecho.lab.clients import batch_size
from maecho.lab.experiment import Experiment, settings
from maecho.lab.results import results_path
from maecho.lab.runs import reproduce
from maecho.lab.tables import markdown, summarise
from maecho.lab.training import LocalTraining
from support.configs import CONFIG

TINY = Experiment(
    name="tiny",
    title="Two clients with digits",
    data="digits",
    network="digits-mlp",
    seeds=(0, 1),
    cells=({"clients": 2, "beta": 0.5, "init": "same"}, {"clients": 2, "beta": 0.5, "init": "different"}),
    methods={
        "local": {"method": "local"},
        "ma-echo": {"method": "ma-echo", "steps": 3},
        "ensemble": {"method": "ensemble", "by": "class-aware"},
    },
    training=LocalTraining(epochs=1, learning_rate=0.05, batch_size=64),
)
ONE = replace(TINY, seeds=(0,), cells=TINY.cells[:1])
RUNS = 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, training fails."""

    def fail(*args: object) -> None:
        raise AssertionError("trained again")

    return lambda: monkeypatch.setattr(LocalTraining, "__call__", fail)


def accuracies(results: dict[str, Any]) -> list[dict[str, float]]:
    return [{name: column["accuracy"] for name, column in run["columns"].items()} for run in results["runs"]]


class Reports:
    """Records the calls of `on_run`: how many runs are done, of how many. May interrupt after some runs."""

    def __init__(self, stop_after: int | None = None):
        self.runs: list[tuple[int, int]] = []
        self.stop_after = stop_after

    def __call__(self, done: int, total: int, run: dict[str, Any]) -> None:
        self.runs.append((done, total))
        if len(self.runs) == self.stop_after:
            raise KeyboardInterrupt


def test_a_run_says_all_about_itself(tmp_path: Path) -> None:
    reports = Reports()
    results = reproduce(TINY, tmp_path, on_run=reports)
    assert json.loads(results_path(TINY, tmp_path).read_text()) == results
    assert reports.runs == [(done, RUNS) for done in range(1, RUNS + 1)]
    assert [(run["cell"], run["seed"]) for run in results["runs"]] == [(c, s) for c in TINY.cells for s in TINY.seeds]
    for run in results["runs"]:
        assert list(run["columns"]) == list(TINY.methods)
        assert {n: column["settings"] for n, column in run["columns"].items()} == {
            n: settings(options) for n, options in TINY.methods.items()
        }
        assert all(0 <= value <= 100 for value in accuracies({"runs": [run]})[0].values())
        assert [len(counts) for counts in run["partition"]] == [10, 10]
        assert run["versions"].keys() >= {"maecho", "torch"}
        assert run["device"] == "cpu"
        assert {column["device"] for column in run["columns"].values()} == {"cpu"}


def test_rounds_go_on_from_the_chain_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that echo-chain has fitted are not fitted again, and the figures equal those of columns run one by one."""
    few = {"draws": 300}
    columns = {
        "chain": {"method": "echo-chain", **few},
        "other": {"method": "echo-relay", "rounds": 2, "draws": 200},
        "small": {"method": "echo-relay", "rounds": 2, **few, "upload": {"rank": 4}},
        "two": {"method": "echo-relay", "rounds": 2, **few},
        "many": {"method": "echo-relay", "rounds": 9, **few},
        "all": {"method": "echo-relay"},
    }
    starts = []

    def watched(*args: Any, start: Any, **options: Any) -> Any:
        starts.append(start is not None)
        return relay(*args, start=start, **options)

    monkeypatch.setattr(importlib.import_module("maecho.lab.runs"), "relay", watched)
    (run,) = reproduce(replace(ONE, methods=columns), tmp_path / "together")["runs"]
    assert starts == [False, False, True, True, False]
    assert run["columns"]["two"]["seconds"] > run["columns"]["chain"]["seconds"]
    for name, options in columns.items():
        (alone,) = reproduce(replace(ONE, methods={name: options}), tmp_path / name)["runs"]
        for key in ("accuracy", "bytes"):
            assert alone["columns"][name][key] == run["columns"][name][key], name


def test_again_does_nothing(tmp_path: Path, no_training: Callable[[], None]) -> None:
    first = reproduce(ONE, tmp_path)
    path = results_path(ONE, tmp_path)
    before = path.read_bytes(), path.stat().st_mtime_ns
    no_training()
    reports = Reports()
    assert reproduce(ONE, tmp_path, on_run=reports) == first
    assert reports.runs == []
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_new_column_costs_no_training(tmp_path: Path, no_training: Callable[[], None]) -> None:
    old = reproduce(ONE, tmp_path)["runs"][0]["columns"]
    no_training()
    more = replace(ONE, methods={**ONE.methods, "regmean": {"method": "regmean"}})
    new = reproduce(more, tmp_path)["runs"][0]["columns"]
    assert list(new) == [*old, "regmean"]
    assert {name: new[name] for name in old} == old  # seconds too: they were not done again


def test_a_changed_option_is_done_again(tmp_path: Path, no_training: Callable[[], None]) -> None:
    old = reproduce(ONE, tmp_path)["runs"][0]["columns"]
    no_training()
    other = replace(ONE, methods={**ONE.methods, "ma-echo": {"method": "fedavg"}})
    new = reproduce(other, tmp_path)["runs"][0]["columns"]
    assert new["ma-echo"]["settings"] == settings({"method": "fedavg"})
    assert new["local"] == old["local"]


def test_a_changed_default_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that does not set an option stands for the default at the time of its run."""
    plain = replace(ONE, methods={"ma-echo": {"method": "ma-echo"}})
    old = accuracies(reproduce(plain, tmp_path))
    monkeypatch.setitem(METHODS, "ma-echo", MAEcho(steps=0))
    new = accuracies(reproduce(plain, tmp_path))
    assert new == accuracies(reproduce(plain, tmp_path / "afresh"))
    assert new != old


def test_old_settings_are_marked(tmp_path: Path) -> None:
    results = reproduce(ONE, tmp_path)
    other = replace(ONE, methods={**ONE.methods, "ma-echo": {"method": "ma-echo", "steps": 4}})
    ((_, figures),) = summarise(other, results)
    assert {name: figure.current for name, figure in figures.items()} == {
        "local": True,
        "ma-echo": False,
        "ensemble": True,
    }
    assert markdown(other, summarise(other, results)).count("†") == 1


def test_a_document_shows_what_was_run(tmp_path: Path) -> None:
    results = reproduce(TINY, tmp_path, columns=["local", "ensemble"])
    head, *_, last = markdown(TINY, summarise(TINY, results)).splitlines()
    assert head == "| clients | beta | init | local | ensemble |"
    assert last.count("±") == 2
    del results["runs"][-1]["columns"]["local"], results["runs"][-2]["columns"]["local"]
    head, *_, last = markdown(TINY, summarise(TINY, results)).splitlines()
    assert "local" in head  # one cell has it
    assert last.startswith("| 2 | 0.5 | different |  |")


def test_an_interruption_loses_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        reproduce(TINY, tmp_path, on_run=Reports(stop_after=1))
    kept = json.loads(results_path(TINY, tmp_path).read_text())["runs"]
    assert len(kept) == 1
    reports = Reports()
    results = reproduce(TINY, tmp_path, on_run=reports)
    assert reports.runs == [(done, RUNS) for done in range(2, RUNS + 1)]
    assert results["runs"][0] == kept[0]
    assert accuracies(results) == accuracies(reproduce(TINY, tmp_path / "at once"))


def test_other_training_is_not_taken_from_old_results(tmp_path: Path) -> None:
    old = reproduce(ONE, tmp_path)
    longer = replace(ONE, training=replace(ONE.training, epochs=3))
    reports = Reports()
    new = reproduce(longer, tmp_path, on_run=reports)
    assert reports.runs == [(1, 1)]
    assert [run["made_of"] for run in new["runs"]] != [run["made_of"] for run in old["runs"]]
    assert accuracies(new) == accuracies(reproduce(longer, tmp_path / "afresh"))
    assert accuracies(new) != accuracies(old)


def test_only_the_columns_asked_for_are_done(tmp_path: Path) -> None:
    assert reproduce(ONE, tmp_path, columns=())["runs"] == []
    first = reproduce(ONE, tmp_path, columns=["ensemble"])["runs"][0]["columns"]
    assert list(first) == ["ensemble"]
    whole = reproduce(ONE, tmp_path)["runs"][0]["columns"]
    assert list(whole) == list(ONE.methods)
    assert whole["ensemble"] == first["ensemble"]
    with pytest.raises(InputError, match=r"columns must be among local, ma-echo, ensemble, got 'fedavg'"):
        reproduce(ONE, tmp_path, columns=["fedavg"])


def test_what_a_client_uploads_is_counted(tmp_path: Path) -> None:
    methods = {
        **ONE.methods,
        "small": {"method": "echo-chain", "upload": {"rank": "90 KB"}},
        "two": {"method": "echo-relay", "rounds": 2, "upload": {"rank": "90 KB"}},
        "relay": {"method": "echo-relay"},
    }
    (run,) = reproduce(replace(ONE, methods=methods), tmp_path)["runs"]
    sizes, weights = {name: column["bytes"] for name, column in run["columns"].items()}, run["weights_bytes"]
    assert weights == 4 * (64 * 100 + 100 * 50 + 50 * 10)
    assert (sizes["local"], sizes["ensemble"]) == (0, weights)
    assert weights < sizes["ma-echo"]
    assert weights < sizes["small"] <= 90_000
    head = 8 * (50 * 51 // 2 + 3 * 10 * 50 + 10 * 10)
    assert 0.9 * head < sizes["two"] - sizes["small"] < 1.1 * head
    prior_and_cross = 2 * 8 * (64 * 100 + 100 * 50 + 50 * 10)
    assert sizes["relay"] > prior_and_cross + 8 * (64 * 65 // 2 + 100 * 101 // 2 + 50 * 51 // 2)


@pytest.mark.parametrize("size", [16, 64, 128])
def test_projectors_are_those_of_one_batch_at_a_time(size: int) -> None:
    """The results do not depend on how many examples are gathered at once."""
    model, digits = networks.build("digits-mlp", torch.Generator().manual_seed(0)), data.digits()
    at_once = batch_size(replace(ONE, training=replace(ONE.training, batch_size=size)))
    assert at_once >= size
    one, other = (
        make_upload(model, data.batches(digits.x_train, digits.y_train, n), "ann", ["projector"], rank=None)
        for n in (size, at_once)
    )
    for name, P in one.statistics["projector"].items():
        torch.testing.assert_close(P.dense(), other.statistics["projector"][name].dense(), rtol=0, atol=1e-6)


def test_same_and_different_initialisations_share_nothing_but_the_split(tmp_path: Path) -> None:
    same, _, different, _ = reproduce(TINY, tmp_path)["runs"]
    assert same["partition"] == different["partition"]
    assert same["made_of"] != different["made_of"]


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = replace(TINY, cells=TINY.cells[1:])
    one = reproduce(pair, tmp_path / "one")
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "another cache"))
    two = reproduce(pair, tmp_path / "two", jobs=2)
    assert accuracies(two) == accuracies(one)
    assert [run["made_of"] for run in two["runs"]] == [run["made_of"] for run in one["runs"]]


@pytest.mark.parametrize("damage", [b"", b"half a fi", b"a model of nothing at all" * 100])
def test_a_damaged_cache_file_is_made_again(tmp_path: Path, cache: Path, damage: bytes) -> None:
    first = reproduce(ONE, tmp_path)
    trained = sorted((cache / "clients").iterdir())
    assert len(trained) == 2
    whole = [path.read_bytes() for path in trained]
    trained[0].write_bytes(damage)
    assert accuracies(reproduce(ONE, tmp_path / "again")) == accuracies(first)
    assert [path.read_bytes() for path in trained] == whole


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "list": lambda results: [],
    "no runs": lambda results: {},
    "run of nothing": lambda results: {"runs": [None]},
    "run without a cell": lambda results: {"runs": [{"made_of": "this", "seed": 0, "columns": {}}]},
    "run without columns": lambda results: {"runs": [{**results["runs"][0], "columns": None}]},
    "column without an accuracy": lambda results: {"runs": [{**results["runs"][0], "columns": {"local": 3}}]},
}


@pytest.mark.parametrize("damage", ["cut", *DAMAGED])
def test_damaged_results_are_left_alone(tmp_path: Path, damage: str) -> None:
    path = results_path(ONE, tmp_path)
    results = reproduce(ONE, tmp_path)
    text = path.read_text()[:-30] if damage == "cut" else json.dumps(DAMAGED[damage](results))
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        reproduce(ONE, tmp_path)
    assert str(path) in str(caught.value)
    assert "must hold results of tiny, got something else" in str(caught.value)
    assert path.read_text() == text


@pytest.mark.parametrize("name", experiment.names())
def test_every_config_runs_quickly(tmp_path: Path, name: str) -> None:
    """The quick run keeps the config's cells and columns. Here it trains for only one epoch."""
    quick = Experiment.load(name, quick=True)
    quick = replace(quick, seeds=quick.seeds[:1], training=replace(quick.training, epochs=1))
    table = summarise(quick, reproduce(quick, tmp_path))
    assert [cell for cell, _ in table] == list(quick.cells)
    for _, figures in table:
        assert list(figures) == list(quick.methods)
        assert all(0 <= figure.low == figure.mean == figure.high <= 100 for figure in figures.values())
        assert all(figure.paper is None for figure in figures.values())  # the paper has no digits


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CONFIG)
    assert len(reproduce(Experiment.load(str(tmp_path / "mine.toml")), tmp_path)["runs"]) == 1


def test_a_bare_machine_reproduces_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(experiment.CHECKOUT))
    bare = importlib.import_module("bare")
    (tmp_path / "mine.toml").write_text(CONFIG)
    words = ["bare.py", str(tmp_path / "mine.toml"), "--columns", "ensemble", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    bare.main()
    (run,) = json.loads((tmp_path / "mine.json").read_text())["runs"]
    assert list(run["columns"]) == ["ensemble"]
    assert "| 2 | 0.5 | same |" in capsys.readouterr().out


def test_an_installed_package_writes_into_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert results_path(TINY).parent == experiment.folder() / "results"
    monkeypatch.setattr(experiment, "CHECKOUT", tmp_path / "not a checkout")
    assert results_path(TINY).parent == Path("maecho-results")
