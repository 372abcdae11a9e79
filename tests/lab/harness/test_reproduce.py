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

from maecho import InputError, make_upload, relay
from maecho.lab import data, experiment
from maecho.lab.columns import settings
from maecho.lab.experiment import Experiment
from maecho.lab.harness.clients import Cohort
from maecho.lab.harness.columns import Bench, code_of
from maecho.lab.harness.results import results_path
from maecho.lab.harness.runs import Event, reproduce
from maecho.lab.report.tables import markdown, summarise
from maecho.lab.training import LocalTraining
from maecho.upload import storage
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
        "ma-echo, 3 steps": {"method": "ma-echo", "steps": 3},
        "ensemble, class-aware": {"method": "ensemble", "by": "class-aware"},
    },
    training=LocalTraining(epochs=1, learning_rate=0.05, batch_size=64),
)
ONE = replace(TINY, seeds=(0,), cells=TINY.cells[:1])
COLUMNS = 12
"""Of all cells and seeds."""


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
    """Records what happens. May interrupt after some columns."""

    def __init__(self, stop_after: int | None = None):
        self.events: list[Event] = []
        self.stop_after = stop_after

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if len(self.of("measured")) == self.stop_after:
            raise KeyboardInterrupt

    def of(self, what: str) -> list[tuple[Any, int, str]]:
        return [(event.cell, event.seed, event.column) for event in self.events if event.what == what]


def test_a_run_says_all_about_itself(tmp_path: Path) -> None:
    reports = Reports()
    results = reproduce(TINY, tmp_path, on_event=reports)
    assert json.loads(results_path(TINY, tmp_path).read_text()) == results
    order = [(cell, seed) for cell in TINY.cells for seed in TINY.seeds]
    assert (
        reports.of("measured") == reports.of("started") == [(*run, column) for run in order for column in TINY.methods]
    )
    assert len(reports.of("training")) == 2 * len(order), "two clients a run"
    assert [(run["cell"], run["seed"]) for run in results["runs"]] == order
    for run in results["runs"]:
        assert list(run["columns"]) == list(TINY.methods)
        assert [len(counts) for counts in run["partition"]] == [10, 10]
        for name, record in run["columns"].items():
            assert record["settings"] == settings(TINY.methods[name])
            assert 0 <= record["accuracy"] <= 100
            assert record["versions"].keys() >= {"maecho", "torch", "numpy", "python"}
            assert (record["device"], record["trained_on"]) == ("cpu", "cpu")
            assert record["data"] == run["data"] == data.digits().digest
            assert record["clients"] == run["clients"]
            assert results["code"][record["code"]] == dict(code_of(TINY.methods[name]).modules)
            assert record["seconds"].keys() == {"training", "gathering", "merging"}
            assert record["seconds"]["training"] > 0
        assert len({record["weights"] for record in run["columns"].values()}) == 1
    assert results["code"].keys() == {r["code"] for run in results["runs"] for r in run["columns"].values()}


def test_what_a_column_gathers_does_not_depend_on_the_columns_before_it() -> None:
    """The released projector depends on the order of examples. It is that of a first pass, however many were made."""
    cohort = Cohort.of(ONE, ONE.cells[0], 0, data.digits())
    first, after = Bench(cohort, "cpu"), Bench(cohort, "cpu")
    for names in (["gram"], ["moments"]):
        after.gather(names, {})
    for one, other in zip(*(bench.gather(["projector"], {}).uploads for bench in (first, after)), strict=True):
        for layer, P in one.statistics["projector"].items():
            assert torch.equal(P.dense(), other.statistics["projector"][layer].dense())
    again = data.batches(*next(iter(cohort.batches(0))), 16, torch.Generator().manual_seed(0))
    assert not torch.equal(next(iter(again))[0], next(iter(again))[0]), "every pass over one iterable has another order"


def test_rounds_go_on_from_the_chain_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that echo-chain has fitted are not fitted again, and the figures equal those of columns run one by one."""
    few = {"draws": 300}
    columns = {
        "chain": {"method": "echo-chain", **few},
        "other": {"method": "echo-relay", "rounds": 2, "draws": 200},
        "small": {"method": "echo-relay", "rounds": 2, **few, "upload": {"rank": 4}},
        "two": {"method": "echo-relay", "rounds": 2, **few},
        "many": {"method": "echo-relay", "rounds": 9, **few},
        "echo-relay": {"method": "echo-relay"},
    }
    starts = []

    def watched(*args: Any, start: Any, **options: Any) -> Any:
        starts.append(start is not None)
        return relay(*args, start=start, **options)

    monkeypatch.setattr(importlib.import_module("maecho.lab.harness.columns"), "relay", watched)
    (run,) = reproduce(replace(ONE, methods=columns), tmp_path / "together")["runs"]
    assert starts == [False, False, True, True, False]
    seconds = {name: record["seconds"]["merging"] for name, record in run["columns"].items()}
    assert seconds["two"] > seconds["chain"], "what it goes on from counts"
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
    assert reproduce(ONE, tmp_path, on_event=reports) == first
    assert {event.what for event in reports.events} == {"fits"}
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
    name = "ma-echo, 3 steps"
    other = replace(ONE, methods={**ONE.methods, name: {"method": "ma-echo", "steps": 4}})
    new = reproduce(other, tmp_path)["runs"][0]["columns"]
    assert "steps=4" in new[name]["settings"]
    assert new["local"] == old["local"]


def test_old_settings_are_marked(tmp_path: Path) -> None:
    results = reproduce(ONE, tmp_path)
    other = replace(ONE, methods={**ONE.methods, "ma-echo, 3 steps": {"method": "ma-echo", "steps": 4}})
    ((_, figures),) = summarise(other, results)
    assert [figure.marks for figure in figures.values()] == ["", "†", ""]
    assert markdown(other, summarise(other, results)).count("†") == 1


def test_a_document_shows_what_was_run(tmp_path: Path) -> None:
    results = reproduce(TINY, tmp_path, columns=["local", "ensemble, class-aware"])
    head, *_, last = markdown(TINY, summarise(TINY, results)).splitlines()
    assert head == "| clients | beta | init | local | ensemble, class-aware |"
    assert last.count("±") == 2
    del results["runs"][-1]["columns"]["local"], results["runs"][-2]["columns"]["local"]
    head, *_, last = markdown(TINY, summarise(TINY, results)).splitlines()
    assert "local" in head  # one cell has it
    assert last.startswith("| 2 | 0.5 | different |  |")


@pytest.mark.parametrize("after", [1, 3, 4])
def test_an_interruption_loses_nothing(tmp_path: Path, after: int) -> None:
    """It may come between two columns of a run, or between two runs."""
    with pytest.raises(KeyboardInterrupt):
        reproduce(TINY, tmp_path, on_event=Reports(stop_after=after))
    kept = json.loads(results_path(TINY, tmp_path).read_text())["runs"]
    assert sum(len(run["columns"]) for run in kept) == after
    reports = Reports()
    results = reproduce(TINY, tmp_path, on_event=reports)
    assert (len(reports.of("fits")), len(reports.of("measured"))) == (after, COLUMNS - after)
    assert results["runs"][0]["columns"]["local"] == kept[0]["columns"]["local"]
    assert accuracies(results) == accuracies(reproduce(TINY, tmp_path / "at once"))


def test_other_training_is_not_taken_from_old_results(tmp_path: Path) -> None:
    old = reproduce(ONE, tmp_path)
    longer = replace(ONE, training=replace(ONE.training, epochs=3))
    reports = Reports()
    new = reproduce(longer, tmp_path, on_event=reports)
    assert len(reports.of("again")) == len(ONE.methods)
    assert new["runs"][0]["clients"] != old["runs"][0]["clients"]
    assert accuracies(new) == accuracies(reproduce(longer, tmp_path / "afresh"))
    assert accuracies(new) != accuracies(old)


def test_only_the_columns_asked_for_are_done(tmp_path: Path) -> None:
    assert reproduce(ONE, tmp_path, columns=())["runs"] == []
    first = reproduce(ONE, tmp_path, columns=["local"])["runs"][0]["columns"]
    assert list(first) == ["local"]
    whole = reproduce(ONE, tmp_path)["runs"][0]["columns"]
    assert list(whole) == list(ONE.methods)
    assert whole["local"] == first["local"]
    with pytest.raises(InputError, match=r"columns must be among local, .*class-aware, got 'fedavg'"):
        reproduce(ONE, tmp_path, columns=["fedavg"])


def test_what_a_client_uploads_is_counted(tmp_path: Path) -> None:
    methods = {
        **ONE.methods,
        "ensemble": {"method": "ensemble"},
        "small": {"method": "echo-chain", "upload": {"rank": "90 KB"}},
        "two": {"method": "echo-relay", "rounds": 2, "upload": {"rank": "90 KB"}},
        "echo-relay": {"method": "echo-relay"},
        "pooled": {"method": "pooled"},
    }
    (run,) = reproduce(replace(ONE, methods=methods), tmp_path)["runs"]
    sizes, weights = {name: column["bytes"] for name, column in run["columns"].items()}, run["weights_bytes"]
    assert weights == 4 * (64 * 100 + 100 * 50 + 50 * 10)
    assert (sizes["local"], sizes["pooled"], sizes["ensemble"]) == (0, 0, weights)
    assert sizes["ensemble, class-aware"] == weights + 10 * 8, "and how many examples of each class"
    assert weights < sizes["ma-echo, 3 steps"]
    assert weights < sizes["small"] <= 90_000
    head = 8 * (50 * 51 // 2 + 3 * 10 * 50 + 10 * 10)
    assert 0.9 * head < sizes["two"] - sizes["small"] < 1.1 * head
    prior_and_cross = 2 * 8 * (64 * 100 + 100 * 50 + 50 * 10)
    assert sizes["echo-relay"] > prior_and_cross + 8 * (64 * 65 // 2 + 100 * 101 // 2 + 50 * 51 // 2)


@pytest.mark.parametrize(("size", "mean_of"), [(16, 16), (64, 64), (128, 64)])
def test_projectors_are_those_of_the_release(size: int, mean_of: int) -> None:
    """A mean is over a batch of training, and never over more than 64 examples, whatever the default of uploads is."""
    cohort = Cohort.of(replace(ONE, training=replace(ONE.training, batch_size=size)), ONE.cells[0], 0, data.digits())
    bench = Bench(cohort, "cpu")
    upload = bench.gather(["projector"], {}).uploads[0]
    model, batches = bench.clients[0]
    x = torch.cat([x for x, _ in batches])
    assert len(x) % mean_of
    expected = make_upload(model, x.split(mean_of), "ann", ["projector"], rank=None, mean_of=mean_of)
    for name, P in expected.statistics["projector"].items():
        torch.testing.assert_close(P.dense(), upload.statistics["projector"][name].dense(), rtol=0, atol=1e-6)


def test_same_and_different_initialisations_share_nothing_but_the_split(tmp_path: Path) -> None:
    same, _, different, _ = reproduce(TINY, tmp_path)["runs"]
    assert same["partition"] == different["partition"]
    assert same["clients"] != different["clients"]


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = replace(TINY, cells=TINY.cells[1:])
    one = reproduce(pair, tmp_path / "one")
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "another cache"))
    two = reproduce(pair, tmp_path / "two", jobs=2)
    assert accuracies(two) == accuracies(one)
    assert [run["clients"] for run in two["runs"]] == [run["clients"] for run in one["runs"]]


@pytest.mark.parametrize("damage", [b"", b"half a fi", b"a model of nothing at all" * 100])
def test_a_damaged_cache_file_is_made_again(tmp_path: Path, cache: Path, damage: bytes) -> None:
    first = reproduce(ONE, tmp_path)
    trained = sorted((cache / "clients").glob("*.safetensors"))
    assert len(trained) == 2
    trained[0].write_bytes(damage)
    again = reproduce(ONE, tmp_path / "again")
    assert accuracies(again) == accuracies(first)
    weights = [
        {record["weights"] for run in results["runs"] for record in run["columns"].values()}
        for results in (first, again)
    ]
    assert weights[0] == weights[1]
    assert storage.read_about(trained[0], "model")["trained"]["client"] in (0, 1), "the file is whole again"


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "list": lambda results: [],
    "no runs": lambda results: {"format": 2},
    "run of nothing": lambda results: {**results, "runs": [None]},
    "run without a cell": lambda results: {**results, "runs": [{"clients": "this", "seed": 0, "columns": {}}]},
    "run without columns": lambda results: {**results, "runs": [{**results["runs"][0], "columns": None}]},
    "column without an accuracy": lambda results: {
        **results,
        "runs": [{**results["runs"][0], "columns": {"local": 3}}],
    },
    "column without settings": lambda results: {
        **results,
        "runs": [
            {**results["runs"][0], "columns": {"local": {"accuracy": 3.0, "code": "", "data": "", "clients": ""}}}
        ],
    },
    "code that is a number": lambda results: {**results, "code": {"abc": 3}},
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
    words = ["bare.py", str(tmp_path / "mine.toml"), "--columns", "ensemble, logits", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    bare.main()
    (run,) = json.loads((tmp_path / "mine.json").read_text())["runs"]
    assert list(run["columns"]) == ["ensemble, logits"]
    assert "| 2 | 0.5 | same |" in capsys.readouterr().out


def test_an_installed_package_writes_into_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert results_path(TINY).parent == experiment.folder() / "results"
    monkeypatch.setattr(experiment, "CHECKOUT", tmp_path / "not a checkout")
    assert results_path(TINY).parent == Path("maecho-results")
