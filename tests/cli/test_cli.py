"""The command line: it says what the Python functions say, and errors are one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from maecho import METHODS, Ensemble, Merged, Upload, __version__, aggregate, evaluate
from maecho.cli import app as cli
from maecho.cli import factories as named
from maecho.lab import demo, experiment
from maecho.statistics.gather import STATISTICS
from maecho.upload import storage as files
from support.damage import forged
from support.tiny import QUICK, cases

MODULE = """
import torch
from torch import nn


def network(width=4):
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 3))


def wide():
    return network(5)


def data(seed):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
    return [(x[:40], x[:40, :3].argmax(1)), (x[40:], x[40:, :3].argmax(1))]


def ann():
    return data(1)


def bob():
    return [(x[y != seen], y[y != seen]) for seen in (0,) for x, y in data(2)]


def narrow():
    return [(x[:, :3], y) for x, y in data(1)]


def nothing():
    return []


def number():
    return 7


def needs(argument):
    return network()


constant = 7
"""
UNIQUE = count()


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's own module in the current folder, with trained weights of two clients beside; its name."""
    name = f"clinic_{next(UNIQUE)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for seed, client in enumerate(("ann", "bob")):
        rng = torch.Generator().manual_seed(seed)
        shapes = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (3, 6), "2.bias": (3,)}
        save_file({key: torch.randn(shape, generator=rng) for key, shape in shapes.items()}, f"{client}-weights")
    return name


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`maecho …` in this process. An error that is not told as one would come through."""
    for key, value in {"COLUMNS": "200", "TERM": "dumb", "MAECHO_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("MAECHO_DEBUG", raising=False)

    def run(line: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["maecho", *shlex.split(line)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        said = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def uploads(module: str, run: Run) -> list[Path]:
    for client in ("ann", "bob"):
        given = f"--model {module}:network --weights {client}-weights --data {module}:{client} --client {client}"
        assert run(f"upload {given} --out {client}.safetensors").code == 0
    return [Path("ann.safetensors"), Path("bob.safetensors")]


def test_upload_and_inspect(module: str, uploads: list[Path], run: Run) -> None:
    found, about = Upload.load(uploads[0]), run("inspect ann.safetensors --json").json
    assert (about["client"], about["examples"]) == (found.client, found.examples) == ("ann", 60)
    assert about["fingerprint"] == found.fingerprint
    assert about["statistics"] == sorted(found.has) == ["classes", "features", "gram", "moments", "projector"]
    assert about["bytes"] == uploads[0].stat().st_size
    assert {tuple(entry["shape"]) for entry in about["tensors"]} == {tuple(t.shape) for t in found.tensors().values()}
    assert about["reveals"].keys() == {"weights", *found.has}
    torch.testing.assert_close(dict(found.weights), load_file("ann-weights"))
    shown = run("inspect ann.safetensors").out
    assert all(word in shown for word in ("ann", "60 examples", "0.weight", "What it can reveal"))


def test_upload_narrowed(module: str, run: Run) -> None:
    given = f"--model {module}:network --data {module}:ann --client ann --out ann.safetensors"
    about = run(f"upload {given} --statistics gram,classes --rank 2 --json").json
    assert about["statistics"] == ["classes", "gram"]
    assert {entry["rank"] for entry in about["tensors"]} == {2, None}
    assert all(gram.rank == 2 for gram in Upload.load("ann.safetensors").grams.values())


@pytest.mark.parametrize("method", METHODS)
def test_aggregate(module: str, uploads: list[Path], run: Run, method: str) -> None:
    for client in ("ann", "bob"):
        given = f"--model {module}:network --weights {client}-weights --data {module}:{client} --client {client}"
        everything = f"--statistics {','.join(STATISTICS)} --labels sampled --seed 3"
        assert run(f"upload {given} {everything} --force --out {client}.safetensors").code == 0
    options = QUICK.get(method, {})
    given = "".join(f" --set {name}={value}" for name, value in options.items()) + f" --model {module}:network"
    line = f"aggregate ann.safetensors bob.safetensors --method {method}{given} --out merged.safetensors --json"
    said = run(line).json
    assert said["recipe"]["method"] == method
    assert said["recipe"]["clients"] == 2
    expected = aggregate(uploads, method, model=named.model(f"{module}:network"), **options)
    torch.testing.assert_close(dict(Merged.load("merged.safetensors")), dict(expected))


def test_aggregate_with_options(uploads: list[Path], run: Run) -> None:
    said = run("aggregate ann.safetensors bob.safetensors --set steps=5 --set form=printed --out merged.safetensors")
    assert said.code == 0
    assert "2 clients by MAEcho(form='printed', steps=5" in said.out
    torch.testing.assert_close(
        dict(Merged.load("merged.safetensors")), dict(aggregate(uploads, steps=5, form="printed"))
    )


def test_evaluate(module: str, uploads: list[Path], run: Run) -> None:
    aggregate(uploads).save("merged.safetensors")
    for file in ("merged.safetensors", "ann.safetensors", "ann-weights"):
        said = run(f"evaluate --model {module}:network --weights {file} --data {module}:bob --json").json
        found = evaluate(named.model(f"{module}:network", Path(file)), named.batches(f"{module}:bob"))
        assert said["accuracy"] == found.accuracy
        assert said["examples"] == sum(found.examples)
        assert said["per_class"] == [None, *found.per_class[1:]]
    shown = run(f"evaluate --model {module}:network --weights merged.safetensors --data {module}:bob").out
    assert "no example" in shown
    assert "Accuracy of the model" in shown


@pytest.mark.parametrize("by", ["logits", "probabilities", "class-aware"])
def test_evaluate_an_ensemble(module: str, uploads: list[Path], run: Run, by: Any) -> None:
    members = "--weights ann.safetensors --weights bob.safetensors"
    said = run(f"evaluate --model {module}:network {members} --by {by} --data {module}:ann --json").json
    models = [named.model(f"{module}:network", path) for path in uploads]
    counts = [Upload.load(path).class_counts for path in uploads]
    assert said["accuracy"] == evaluate(Ensemble(models, by, counts), named.batches(f"{module}:ann")).accuracy


def test_a_name_is_shown_as_it_is(module: str, run: Run) -> None:
    """Also one that looks like markup."""
    given = f"--model {module}:network --data {module}:ann --out [a].safetensors"
    said = run(f"upload {given} --client '[/clinic] [red]'")
    assert said.code == 0
    assert "[/clinic] [red]" in said.out
    assert "[a].safetensors" in said.out


def test_methods(run: Run) -> None:
    said = run("methods --json").json
    assert said.keys() == METHODS.keys()
    assert {name: set(about["needs"]) for name, about in said.items()} == {n: m.needs for n, m in METHODS.items()}
    assert said["ma-echo"]["options"]["form"] == "released"
    assert {rung["rounds"] for one in said["echo-chain"]["ladder"] for rung in one["rungs"]} >= {1, 2, "all"}
    shown = run("methods").out
    assert all(name in shown for name in METHODS)
    assert "From one shot to a round a layer" in shown


def test_reproduce_without_a_name(run: Run) -> None:
    lines = run("reproduce").out.splitlines()
    assert [line.split(":")[0] for line in lines] == experiment.names()


@pytest.mark.slow
def test_reproduce_again_does_nothing_new(tmp_path: Path, run: Run) -> None:
    first = run(f"reproduce table-1 --quick --out {tmp_path}")
    assert first.code == 0
    assert all(word in first.out for word in ("quick", "ma-echo", "low–high, [paper]", "table-1-quick.json"))
    path = tmp_path / "table-1-quick.json"
    before, when = path.read_bytes(), path.stat().st_mtime_ns
    again = run(f"reproduce table-1 --quick --out {tmp_path} --json").json
    assert again == json.loads(before)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, when)


def test_reproduce_some_columns_and_show_what_is_there(tmp_path: Path, run: Run) -> None:
    assert run(f"reproduce table-1 --quick --out {tmp_path} --show --json").json["runs"] == []
    assert list(tmp_path.iterdir()) == []
    run(f"reproduce table-1 --quick --out {tmp_path} --columns local,fedavg")
    picture = tmp_path / "bytes.svg"
    shown = run(f"reproduce table-1 --quick --out {tmp_path} --show --json --picture {picture}").json
    assert all(list(one["columns"]) == ["local", "fedavg"] for one in shown["runs"])
    assert len(shown["runs"]) == 4
    assert ">fedavg<" in picture.read_text()


@pytest.mark.slow
def test_demo(tmp_path: Path, run: Run) -> None:
    said = run(f"demo --clients 2 --out {tmp_path / 'demo'} --json").json
    assert len(said["uploads"]) == len(said["class_counts"]) == 2
    for file in [*said["uploads"], *(row["file"] for row in said["rows"] if row["file"])]:
        assert files.read_about(Path(file), "model" if "merged" in file else "upload")
    assert [Path(file).stat().st_size for file in said["uploads"]] == said["upload_bytes"]
    assert {row["name"] for row in said["rows"]} > set(demo.MERGED)
    assert all(0 <= row["accuracy"] <= 1 for row in said["rows"])


COMMANDS = list(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(run: Run, command: str) -> None:
    said = run(f"{command} --help")
    assert said.code == 0
    assert f"Example: maecho {command}" in " ".join(said.out.replace("│", " ").replace("`", "").split())


UPLOAD = "upload --client ann --out new.safetensors"
EVALUATE = "evaluate --data MODULE:ann"
AGGREGATE = "aggregate ann.safetensors bob.safetensors --out new.safetensors"
ERRORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no colon": (f"{UPLOAD} --model MODULE --data MODULE:ann", ("model", "package.module:factory", "clinic_")),
    "no factory": (f"{UPLOAD} --model MODULE: --data MODULE:ann", ("model", "package.module:factory")),
    "no module": (f"{UPLOAD} --model nowhere:network --data MODULE:ann", ("model", "cannot import 'nowhere'")),
    "relative module": (f"{UPLOAD} --model .MODULE:network --data MODULE:ann", ("model", "'.clinic_")),
    "no attribute": (f"{UPLOAD} --model MODULE:other --data MODULE:ann", ("model", "function 'other'", "got none")),
    "no function": (f"{UPLOAD} --model MODULE:constant --data MODULE:ann", ("model", "function 'constant'")),
    "factory with arguments": (f"{UPLOAD} --model MODULE:needs --data MODULE:ann", ("model", "needs", "argument")),
    "no model": (f"{UPLOAD} --model MODULE:number --data MODULE:ann", ("model", "torch.nn.Module", "got int")),
    "no batches": (f"{UPLOAD} --model MODULE:network --data MODULE:number", ("data", "batches", "got int")),
    "no examples": (f"{UPLOAD} --model MODULE:network --data MODULE:nothing", ("ann", "at least one example")),
    "data of another width": (f"{UPLOAD} --model MODULE:network --data MODULE:narrow", ("ann", "4", "3")),
    "bad rank": (f"{UPLOAD} --model MODULE:network --data MODULE:ann --rank '3 apples'", ("rank", "3 apples")),
    "unknown statistic": (f"{UPLOAD} --model MODULE:network --data MODULE:ann --statistics hessian", ("hessian",)),
    "pickled weights": (f"{EVALUATE} --model MODULE:network --weights ann.pt", ("safetensors", "ann.pt", "run code")),
    "other weights": (f"{EVALUATE} --model MODULE:wide --weights ann.safetensors", ("ann.safetensors", "0.weight")),
    "weights of the future": (f"{EVALUATE} --model MODULE:network --weights newer", ("newer", "newer maecho")),
    "missing weights": (f"{EVALUATE} --model MODULE:network --weights no.safetensors", ("no.safetensors", "nothing")),
    "class-aware without counts": (
        f"{EVALUATE} --model MODULE:network --weights ann-weights --weights bob-weights --by class-aware",
        ("ann-weights", "maecho upload"),
    ),
    "missing upload": (f"{AGGREGATE} no.safetensors", ("no.safetensors must be a file", "got nothing")),
    "a client twice": (f"{AGGREGATE} ann.safetensors", ("ann", "once", "twice")),
    "unknown method": (f"{AGGREGATE} --method best", ("fedavg, ma-echo", "regmean", "'best'")),
    "set without a value": (f"{AGGREGATE} --set steps", ("--set", "name=value", "'steps'")),
    "set what is not there": (f"{AGGREGATE} --set stepz=3", ("ma-echo", "steps", "'stepz'")),
    "set out of range": (f"{AGGREGATE} --set steps=-3", ("steps", "at least 0", "-3")),
    "set to text": (f"{AGGREGATE} --set steps=many", ("steps", "many")),
    "set to infinity": (f"{AGGREGATE} --set step_size=Infinity", ("step_size", "inf")),
    "set the method": (f"{AGGREGATE} --set method=fedavg", ("ma-echo", "'method'")),
    "out is a folder": ("aggregate ann.safetensors --out .", ("cannot write",)),
    "inspect a script": ("inspect MODULE.py", ("MODULE.py", "safetensors")),
    "unknown experiment": ("reproduce table-99", ("table-1", "'table-99'")),
    "no data": ("reproduce table-1 --out new", ("mnist", "MAECHO_DATA")),
    "unknown column": ("reproduce table-1 --quick --out new --columns ma-ecco", ("ma-echo", "'ma-ecco'")),
    "no column": ("reproduce table-1 --quick --out new --columns ,", ("ma-echo", "got ''")),
    "no picture": ("reproduce table-1 --quick --out new --picture a.gif", (".svg", "'a.gif'")),
    "show and do": ("reproduce table-1 --quick --out new --columns local --show", ("--show", "--columns")),
    "no such device": ("reproduce table-1 --quick --out new --device abacus", ("abacus",)),
    "bad beta": ("demo --out new --beta -1", ("beta", "positive", "-1")),
}


@pytest.mark.parametrize(("line", "parts"), **cases(ERRORS))
def test_an_error_is_one_line_and_nothing_is_written(
    module: str, uploads: list[Path], run: Run, monkeypatch: pytest.MonkeyPatch, line: str, parts: tuple[str, ...]
) -> None:
    about = files.read_about(uploads[0], "upload") | {"version": files.VERSION + 1}
    forged(Path("newer"), load_file(uploads[0]), about)
    Path("ann.pt").write_bytes(b"pickle")
    monkeypatch.setenv("MAECHO_DATA", "nowhere")

    def here() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    before = here()
    said = run(line.replace("MODULE", module))
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    for part in parts:
        assert part.replace("MODULE", module) in said.err
    assert here() == before


def test_debug_shows_what_lies_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAECHO_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["maecho", "inspect", "nothing.safetensors"])
    with pytest.raises(ValueError, match="got nothing"):
        cli.main()


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as a user starts it."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "maecho", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_a_process_says_its_version() -> None:
    said = started("--version")
    assert (said.returncode, said.stdout, said.stderr) == (0, f"maecho {__version__}\n", "")


@pytest.mark.slow
def test_a_process_finds_the_module_in_the_current_folder(module: str) -> None:
    given = ("--model", f"{module}:network", "--data", f"{module}:ann", "--client", "ann", "--out", "ann.safetensors")
    said = started("upload", *given, "--json")
    assert (said.returncode, said.stderr) == (0, "")
    assert json.loads(said.stdout)["client"] == Upload.load("ann.safetensors").client == "ann"


@pytest.mark.slow
def test_a_process_ends_an_error_with_one_line_and_code_2() -> None:
    said = started("inspect", "nothing.safetensors")
    wanted = "error: nothing.safetensors must be a file, got nothing at that place\n"
    assert (said.returncode, said.stdout, said.stderr) == (2, "", wanted)
