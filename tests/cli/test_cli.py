"""The command line: it gives the results of the Python functions, and errors are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file

from maecho import METHODS, Ensemble, Merged, Upload, __version__, aggregate, evaluate
from maecho.cli import app as cli
from maecho.cli import factories
from maecho.lab import demo, experiment
from maecho.statistics import STATISTICS
from maecho.upload import storage as files
from support.configs import CONFIG
from support.pages import parse
from support.tiny import QUICK

Run = Callable[..., Any]


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
    assert all(gram.rank == 2 for gram in Upload.load("ann.safetensors").statistics["gram"].values())


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
    expected = aggregate(uploads, method, model=factories.model(f"{module}:network"), **options)
    torch.testing.assert_close(dict(Merged.load("merged.safetensors")), dict(expected))


def test_aggregate_with_options(uploads: list[Path], run: Run) -> None:
    said = run("aggregate ann.safetensors bob.safetensors --set steps=5 --set form=printed --out merged.safetensors")
    assert said.code == 0
    assert "2 clients by MAEcho(form='printed', steps=5" in said.out
    torch.testing.assert_close(
        dict(Merged.load("merged.safetensors")), dict(aggregate(uploads, steps=5, form="printed"))
    )


def found_error(module: str) -> float:
    model = factories.model(f"{module}:network", Path("merged.safetensors"))
    return evaluate(model, factories.batches(f"{module}:bob")).calibration_error


def test_evaluate(module: str, uploads: list[Path], run: Run) -> None:
    aggregate(uploads).save("merged.safetensors")
    for file in ("merged.safetensors", "ann.safetensors", "ann-weights"):
        said = run(f"evaluate --model {module}:network --weights {file} --data {module}:bob --json").json
        found = evaluate(factories.model(f"{module}:network", Path(file)), factories.batches(f"{module}:bob"))
        assert said["accuracy"] == found.accuracy
        assert said["calibration_error"] == found.calibration_error
        assert said["examples"] == sum(found.examples)
        assert said["per_class"] == [None, *found.per_class[1:]]
    shown = run(f"evaluate --model {module}:network --weights merged.safetensors --data {module}:bob").out
    assert "no example" in shown
    assert "Accuracy of the model" in shown
    assert f"Calibration error: {100 * found_error(module):.2f} %" in shown


@pytest.mark.parametrize("by", ["logits", "probabilities", "class-aware"])
def test_evaluate_an_ensemble(module: str, uploads: list[Path], run: Run, by: Any) -> None:
    members = "--weights ann.safetensors --weights bob.safetensors"
    said = run(f"evaluate --model {module}:network {members} --by {by} --data {module}:ann --json").json
    models = [factories.model(f"{module}:network", path) for path in uploads]
    counts = [Upload.load(path).statistics["classes"] for path in uploads]
    assert said["accuracy"] == evaluate(Ensemble(models, by, counts), factories.batches(f"{module}:ann")).accuracy


def test_a_name_is_shown_as_it_is(module: str, run: Run) -> None:
    """A name that looks like markup is printed as it is."""
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
    assert [line.split(":")[0] for line in lines] == experiment.every_name()
    assert "figure-2: Figure 2: how the classes are shared out" in lines


def test_reproduce_all(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables whose data are at hand are made; then one sentence says which are not, and how to get their data."""
    for name, data in (("one", "digits"), ("two", "mnist"), ("three", "digits")):
        (tmp_path / f"{name}.toml").write_text(CONFIG.replace('data = "digits"', f'data = "{data}"'))
    monkeypatch.setattr(experiment, "folder", lambda: tmp_path)
    monkeypatch.setenv("MAECHO_DATA", str(tmp_path / "empty"))
    found = run(f"reproduce --all --out {tmp_path / 'new'}")
    assert sorted(path.name for path in (tmp_path / "new").glob("*.json")) == ["one.json", "three.json"]
    assert found.code == 2
    for part in ("2 of 3 are reproduced, got no data for two (mnist: ", "set MAECHO_DATA"):
        assert part in found.err


@pytest.mark.slow
def test_reproduce_again_does_nothing_new(tmp_path: Path, run: Run) -> None:
    first = run(f"reproduce table-1 --quick --columns local,fedavg,ma-echo --out {tmp_path}")
    assert first.code == 0
    assert all(word in first.out for word in ("quick", "ma-echo", "low–high, [paper]", "table-1-quick.json"))
    path = tmp_path / "table-1-quick.json"
    before, when = path.read_bytes(), path.stat().st_mtime_ns
    again = run(f"reproduce table-1 --quick --columns local,fedavg,ma-echo --out {tmp_path} --json").json
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
def test_demo(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run(f"demo --clients 2 --out {tmp_path / 'demo'} --json").json
    assert len(said["uploads"]) == len(said["class_counts"]) == 2
    for file in [*said["uploads"], *(row["file"] for row in said["rows"] if row["file"])]:
        assert files.read_about(Path(file), "model" if "merged" in file else "upload")
    assert [Path(file).stat().st_size for file in said["uploads"]] == said["upload_bytes"]
    about = [files.read_about(Path(file), "upload")["recipe"]["demo"] for file in said["uploads"]]
    assert about == [{"clients": 2, "beta": 0.01, "seed": 0}] * 2
    again = run(f"demo --clients 2 --out {tmp_path / 'demo'} --json").json  # it replaces what it made
    assert [row["accuracy"] for row in again["rows"]] == [row["accuracy"] for row in said["rows"]]
    assert {row["name"] for row in said["rows"]} > set(demo.MERGED)
    assert all(0 <= row["accuracy"] <= 1 for row in said["rows"])
    page = Path(said["page"])
    assert page.parent == tmp_path / "demo"
    shown = parse(page.read_text()).one("section", aria_labelledby="models").all("table")[0]
    found = [[cell.text for cell in row.all("th") + row.all("td")][:2] for row in shown.one("tbody").all("tr")]
    assert found == [[row["name"], f"{100 * row['accuracy']:.2f} %"] for row in said["rows"]]
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda link: opened.append(link) or True)
    again = run(f"demo --clients 2 --out {tmp_path / 'demo'} --open")
    assert again.code == 0, "it replaces its own files"
    assert str(page) in again.out
    assert opened == [page.as_uri()]


COMMANDS = list(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(run: Run, command: str) -> None:
    said = run(f"{command} --help")
    assert said.code == 0
    assert f"Example: maecho {command}" in " ".join(said.out.replace("│", " ").replace("`", "").split())


def test_force_replaces_and_uploads_are_private(module: str, uploads: list[Path], run: Run) -> None:
    given = f"upload --model {module}:network --data {module}:ann --out ann.safetensors"
    assert uploads[0].stat().st_mode & 0o777 == 0o600
    assert run(f"{given} --client eve --mode 640 --force").code == 0
    assert Upload.load(uploads[0]).client == "eve"
    assert uploads[0].stat().st_mode & 0o777 == 0o640
    merge = "aggregate ann.safetensors bob.safetensors --out merged.safetensors"
    assert [run(merge).code, run(merge).code, run(f"{merge} --force").code] == [0, 2, 0]


def test_debug_shows_what_lies_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAECHO_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["maecho", "inspect", "nothing.safetensors"])
    with pytest.raises(ValueError, match="got nothing"):
        cli.main()


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, as a user does."""
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
