"""The terminal shows the content of a hostile file as plain text."""

from __future__ import annotations

import json
import shlex
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from maecho.cli import console, lab_commands
from maecho.lab.experiment import Experiment
from maecho.lab.harness.results import FORMAT, NEEDED
from maecho.lab.report.tables import Ladder, Rung
from maecho.network.layers import Layer
from maecho.upload import storage as files
from maecho.upload.header import fingerprint
from support.damage import forged

Run = Callable[..., Any]


def hostile(path: Path, out: str, **said: Any) -> None:
    """A sound upload with these names and texts."""
    about, tensors = files.read_about(path, "upload"), load_file(path)
    renamed = {key.replace("0.weight", said.get("weight", "0.weight")): tensor for key, tensor in tensors.items()}
    layers = [{**layer, "weight": layer["weight"].replace("0.weight", said.get("weight", "0.weight"))}
              for layer in about["layers"]]  # fmt: skip
    header = {**about, "layers": layers, "spaces": None, **{k: v for k, v in said.items() if k != "weight"}}
    weights = {k.removeprefix("weights/"): t for k, t in renamed.items() if k.startswith("weights/")}
    header["fingerprint"] = fingerprint(weights, [Layer(**layer) for layer in layers], about["head"], {})
    forged(Path(out), renamed, header)


MARKUP = "[/red] [bold]:smile: [link=file:///x]\\"
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\x7f\r\n"


def test_nothing_from_a_file_is_a_command_to_the_terminal(
    module: str, uploads: list[Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {
        "not_sent": {MARKUP: ESCAPES},
        "privacy": {"epsilon": ESCAPES, "delta": MARKUP, "covers": ESCAPES},
        ESCAPES: ESCAPES,
    }
    hostile(uploads[0], "hostile", client=MARKUP, weight=f"0.{MARKUP}", recipe=recipe, made_by=MARKUP)
    for line in ("inspect hostile", "inspect hostile --json", "aggregate hostile --out merged"):
        said = run(line)
        assert said.code == 0, said.err
        assert all(one.isprintable() or one == "\n" for one in said.out + said.err), line
    assert all(word in " ".join(run("inspect hostile").out.split()) for word in (MARKUP.strip(), r"\x1b[2J", r"\u202e"))
    assert run("inspect hostile --json").json["recipe"][ESCAPES] == ESCAPES
    for said_of in ({"client": ESCAPES}, {"made_by": ESCAPES}, {"head": ESCAPES}, {"statistics": [ESCAPES]}):
        hostile(uploads[0], "hostile", **said_of)
        said = run("inspect hostile")
        assert said.code == 2
        assert said.err.count("\n") == 1
        assert said.err.rstrip("\n").isprintable()
        assert len(said.err) <= 520
    said = run(f"inspect {shlex.quote(MARKUP + ESCAPES)}")
    assert said.code == 2
    assert said.err.rstrip("\n").isprintable()
    (Path.cwd() / f"{module}_warns.py").write_text(
        f"import warnings, {module}\ndef network():\n    warnings.warn({ESCAPES!r})\n    return {module}.network()\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = run(f"evaluate --model {module}_warns:network --data {module}:ann")
    assert said.err.startswith("warning: ")
    assert said.err.rstrip("\n").isprintable()


def test_a_long_name_takes_no_time(uploads: list[Path], run: Run) -> None:
    hostile(uploads[0], "hostile", client="x" * 100_000)
    began = time.perf_counter()
    assert run("inspect hostile").code == 2
    assert time.perf_counter() - began < 10


CONFIG = r"""
title = "TEXT"
data = "digits"
network = "digits-mlp"
seeds = [0]
cells = [{ clients = 2, beta = 0.5 }]

[methods]
fedavg = { method = "fedavg" }
"TEXT" = { method = "ma-echo", steps = 3 }

[training]
epochs = 1
"""


def test_nothing_from_a_config_is_a_command_to_the_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config may come from somebody else, too: its title and its columns are shown as plain text."""
    monkeypatch.chdir(tmp_path)
    text = json.dumps(f"{MARKUP} x|y {ESCAPES}")[1:-1].replace("\x7f", r"\u007f")
    config = Path("hostile.toml")
    config.write_text(CONFIG.replace("TEXT", text), encoding="utf-8")
    record = {"accuracy": 0.5, **dict.fromkeys(NEEDED, "")}
    columns = dict.fromkeys(Experiment.load(str(config)).methods, record)
    run_ = {"cell": {"clients": 2, "beta": 0.5}, "seed": 0, "clients": "", "data": "", "columns": columns}
    results = {"format": FORMAT, "runs": [run_], "code": {}}
    Path("out").mkdir()
    Path("out", "hostile.json").write_text(json.dumps(results))
    for option in ("", "--markdown", "--json"):
        said = run(f"reproduce hostile.toml --show --out out {option}")
        assert said.code == 0, said.err
        assert all(one.isprintable() or one == "\n" for one in said.out + said.err), option
        assert "title" in said.out, "the text of the config is there"
    assert run("reproduce hostile.toml --show --out out --markdown").out.count("\n") == 3
    monkeypatch.setattr(lab_commands, "every_name", lambda: [str(config)])
    listed = run("reproduce")
    assert listed.out.count("\n") == 1
    assert r"\x1b[2J" in listed.out
    assert listed.out.rstrip("\n").isprintable()


def test_a_ladder_is_shown_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{MARKUP} {ESCAPES}"
    console.show_ladders([Ladder(text, 100, (text,), (Rung(text, text, f"at {text}", 200.0, (50.0,)),))])
    said = capsys.readouterr().out
    assert all(one.isprintable() or one == "\n" for one in said)
    assert "[/red]" in said
