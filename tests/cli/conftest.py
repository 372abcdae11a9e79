"""Fixtures: `maecho …` run in this process, a user's own module, and two uploads made with it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from maecho.cli import app as cli

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
    """The name of a user's own module in the current folder. Trained weights of two clients lie beside it."""
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
    """Run `maecho …` in this process. An error that the command line does not handle is raised."""
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
