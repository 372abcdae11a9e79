"""`maecho rounds`: on the embedded digits, on a user's own clients, from a checkpoint, and with mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maecho import Merged
from maecho.cli.app import main

OWN = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def _client(seed, labels):
    draw = torch.Generator().manual_seed(seed)
    y = torch.tensor(labels)[torch.randint(0, len(labels), (24,), generator=draw)]
    return 3 * torch.eye(3, 6)[y] + torch.randn(24, 6, generator=draw), y

def clients():
    pairs = [_client(i, [i % 3, (i + 1) % 3]) for i in range(5)]
    return [pairs[0], *([(x[:10], y[:10]), (x[10:], y[10:])] for x, y in pairs[1:])]

def test():
    return _client(99, [0, 1, 2])

def nobody():
    return []

def number():
    return 5

def words():
    return ["one", "two"]

def one_without():
    return [_client(0, [0, 1]), []]
"""


Run = Callable[..., "Done"]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`maecho rounds` in this process, in a folder."""

    def run(folder: Path, *arguments: str) -> Done:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["maecho", "rounds", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        threads = torch.get_num_threads()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        torch.set_num_threads(threads)
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.mark.slow
def test_by_default_it_compares_four_servers_on_the_digits(tmp_path: Path, run: Run) -> None:
    began = time.monotonic()
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    found = json.loads(done.stdout)
    assert list(found) == ["fedavg", "ma-echo", "regmean", "echo-relay"]
    last = {name: one["accuracy"][-1] for name, one in found.items()}
    assert all(len(one["accuracy"]) == 15 for one in found.values())
    assert last["echo-relay"] > 0.93 > 0.9 > last["fedavg"]
    assert last["regmean"] > 0.88
    assert not list(tmp_path.iterdir()), "nothing is written that nobody asked for"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


MINE = ("--model", "mine:model", "--data", "mine:clients", "--test", "mine:test", "--sampled", "3", "--rounds", "4")


def test_on_a_users_own_clients(own: Path, run: Run) -> None:
    done = run(own, *MINE, "--server", "fedprox:mu=0.2", "--out", "global.safetensors", "--learning-rate", "0.1")
    assert done.returncode == 0, done.stderr
    assert "fedprox:mu=0.2" in done.stdout
    merged = Merged.load(own / "global.safetensors")
    assert merged["0.weight"].shape == (8, 6)
    assert merged.recipe["method"] == "fedprox:mu=0.2"
    assert "Proximal(mu=0.2)" in merged.recipe["options"]
    again = run(own, *MINE, "--server", "fedprox:mu=0.2", "--out", "global.safetensors")
    assert again.returncode == 2
    assert "it must be a new file" in again.stderr


def test_a_killed_run_goes_on(own: Path, run: Run) -> None:
    """Killed as soon as its checkpoint is there, it ends with the weights of a run that nobody disturbed."""
    options = (*MINE[:-1], "20", "--server", "scaffold", "--checkpoints", "kept")
    whole = run(own, *MINE[:-1], "20", "--server", "scaffold", "--out", "whole.safetensors")
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "maecho", "rounds", *options]
    process = subprocess.Popen(command, cwd=own, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (own / "kept" / "scaffold.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = run(own, *options, "--out", "stopped.safetensors")
    assert done.returncode == 0, done.stderr
    one, other = (load_file(own / name) for name in ("whole.safetensors", "stopped.safetensors"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown server": (("--server", "nope"), "--server must be one of fedavg, fedprox"),
    "an unknown option": (("--server", "fedprox:nu=1"), "fedprox has the options mu, pace, got 'nu'"),
    "an option without a value": (("--server", "fedprox:mu"), "options must be name=value, got 'mu'"),
    "a bad option": (("--server", "fedprox:mu=-1"), "mu must be at least 0 and finite, got -1"),
    "sums that are none": (("--server", "ma-echo:kept=0.5"), "reads sums alone, got ma-echo, which reads projector"),
    "too many a round": (("--sampled", "41"), "sampled must be at most the number of clients, 40, got 41"),
    "no rounds": (("--rounds", "0"), "rounds must be a whole number, at least 1, got 0"),
    "too many classes": (("--classes", "30"), "got 30"),
    "an unknown loss": (("--loss", "hinge"), "--loss must be one of cross-entropy"),
    "a negative clip": (("--clip", "-1"), "clip must be positive and finite, got -1.0"),
    "several models for one file": (("--out", "a.safetensors"), "--out must come with a single --server, got 4"),
    "half of a user's own": (("--model", "mine:model"), "must be given together, got none for --data, --test"),
    "no clients": ((*MINE[:2], "--data", "mine:nobody", *MINE[4:]), "the number of clients, 0, got 3"),
    "a number for clients": ((*MINE[:2], "--data", "mine:number", *MINE[4:]), "one entry for each client, got int"),
    "words for clients": ((*MINE[:2], "--data", "mine:words", *MINE[4:]), "client 0 must be inputs and labels, or"),
    "a client without data": (
        (*MINE[:2], "--data", "mine:one_without", *MINE[4:]), "client 1 must have at least one example, got none"),
    "a file for a folder": ((*MINE, "--checkpoints", "mine.py"), "--checkpoints must be a folder, got a file"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_in_one_sentence(case: str, own: Path, run: Run) -> None:
    arguments, part = MISTAKES[case]
    before = {path: path.read_bytes() for path in own.iterdir() if path.is_file()}
    done = run(own, *arguments)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ")
    assert done.stderr.strip().count("\n") == 0
    assert part in done.stderr
    assert {path: path.read_bytes() for path in own.iterdir() if path.is_file()} == before


def test_a_checkpoint_of_other_settings_is_kept(own: Path, run: Run) -> None:
    assert run(own, *MINE, "--server", "fedavg", "--checkpoints", "kept").returncode == 0
    before = (own / "kept" / "fedavg.safetensors").read_bytes()
    done = run(own, *MINE, "--server", "fedavg", "--checkpoints", "kept", "--seed", "1")
    assert done.returncode == 2
    assert "must be a checkpoint of these settings, this network and these clients" in done.stderr
    assert (own / "kept" / "fedavg.safetensors").read_bytes() == before


def facts(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return {name: one["accuracy"] for name, one in json.loads(done.stdout).items()}


def test_a_longer_run_goes_on_from_a_shorter_one(own: Path, run: Run) -> None:
    options = ("--server", "regmean", "--json")
    short = facts(run(own, *MINE, *options, "--checkpoints", "kept"))
    longer = facts(run(own, *MINE[:-1], "6", *options, "--checkpoints", "kept"))
    assert longer["regmean"][:4] == short["regmean"]
    assert longer == facts(run(own, *MINE[:-1], "6", *options))
