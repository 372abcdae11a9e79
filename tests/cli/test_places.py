"""Where the command line may write, told before any work; and what a bar of progress shows."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from maecho import InputError, Upload
from maecho.cli import console
from maecho.cli.values import check_out
from maecho.lab.experiment import Experiment
from maecho.lab.harness.runs import Event


@pytest.mark.parametrize(
    ("kind", "words"), [("link", "a link"), ("dangling", "a link"), ("folder", "a folder"), ("pipe", "a pipe")]
)
@pytest.mark.parametrize("force", [False, True])
def test_a_place_that_is_no_regular_file(tmp_path: Path, kind: str, words: str, force: bool) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=rf"cannot write .*{kind}: --out must name a regular file, got {words}"):
        check_out(tmp_path / kind, force)
    check_out(tmp_path / "new", force)
    check_out(tmp_path / "file", force=True)
    with pytest.raises(InputError, match=r"it must be a new file, got one that exists; --force replaces it"):
        check_out(tmp_path / "file", force=False)


def test_an_input_is_one_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "ann").write_bytes(b"mine")
    (tmp_path / "again").hardlink_to(tmp_path / "ann")
    (tmp_path / "link").symlink_to("ann")
    for out, source in (("ann", "ann"), ("again", "ann"), ("ann", "link"), ("ann", "../" + tmp_path.name + "/ann")):
        with pytest.raises(InputError, match="--out must not be one of the inputs"):
            check_out(tmp_path / out, True, [tmp_path / source])


def test_a_bar_shows_names_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "stderr", lambda: Console(file=screen, force_terminal=True, width=200))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    experiment = replace(Experiment.load("table-1"), name="[/red] mine")
    with console.run_progress(experiment, 2) as on_event:
        on_event(Event("again", {"init": "[/bold] same\x1b[2J"}, 0, "[/blue] column", "of \x1b[3J"))
    assert "[/red] mine" in screen.getvalue()
    assert r"[/bold] same\x1b[2J" in screen.getvalue()
    assert r"[/red] mine: [/blue] column is measured again, since of \x1b[3J" in screen.getvalue()


def test_the_seed_is_that_of_sampled_labels(module: str, run: Callable[..., Any]) -> None:
    line = f"upload --model {module}:network --weights ann-weights --data {module}:ann --client ann --statistics fisher"
    for out, seed in (("one", 1), ("again", 1), ("other", 2)):
        assert run(f"{line} --labels sampled --seed {seed} --out {out}").code == 0
    one, again, other = (Upload.load(out).statistics["fisher"]["0.weight"] for out in ("one", "again", "other"))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
