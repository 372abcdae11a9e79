"""Runs tests of one tree in forked processes: torch is loaded once, and a test that does not end is stopped.

Every worker has a copy of the tree. Mutants are written into the copies, never into the source.
"""

from __future__ import annotations

import compileall
import contextlib
import ctypes
import json
import os
import py_compile
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from support.mutants.project import LEFT_OUT, Project

PAUSE = 0.05
SLOWER = 5
"""A test may take this many times what it took without a mutant, and the worker's patience beside it."""
LOADING = 60
"""Seconds until the first test begins."""
WHOLE_EXPERIMENTS = "not first_cell and not every_config"
"""Tests that run for minutes, and whose parts other tests look at."""
NO_TESTS = 5
"""pytest's exit code if nothing was chosen."""
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True)
class Task:
    """Run these tests while `file` has this text."""

    key: int
    tests: Sequence[str]
    file: str = ""
    text: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a task."""

    key: int
    outcome: str
    """survived, killed or timed out"""
    by: str
    """The test that failed or did not end."""
    seconds: float
    durations: dict[str, float] = field(default_factory=dict)
    entered: dict[str, list[int]] = field(default_factory=dict)
    """Of a task without a mutant: the functions that ran, by file and first line."""
    log: str = ""


class _Watch:
    """Writes down which test runs, which one failed, and how long each took."""

    def __init__(self, folder: Path, sources: Path | None) -> None:
        self.folder, self.durations = folder, dict[str, float]()
        self.prefix, self.entered = f"{sources}{os.sep}", dict[str, set[int]]()
        if sources:
            sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: object) -> None:
        """Called once for each call of a function. It asks for no more, so lines are not traced."""
        code = frame.f_code
        if code.co_filename.startswith(self.prefix):
            self.entered.setdefault(f"src/{code.co_filename.removeprefix(self.prefix)}", set()).add(code.co_firstlineno)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        (self.folder / "running").write_text(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            (self.folder / "failed").write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            (self.folder / "failed").write_text(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        entered = {file: sorted(lines) for file, lines in self.entered.items()}
        (self.folder / "seen").write_text(json.dumps([self.durations, entered]))


class Worker:
    """One copy of the tree, and at most one process that tests it."""

    def __init__(self, project: Project, folder: Path, patience: float) -> None:
        self.patience = patience
        self.project, self.tree, self.notes = project, folder / "tree", folder / "notes"
        self.task: Task | None = None
        shutil.copytree(project.root, self.tree, ignore=LEFT_OUT)
        # A compiled file that is compared by its content: a mutant may have the size and the time of the original.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.tree / "src", quiet=1, invalidation_mode=checked)

    def start(self, task: Task) -> None:
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir()
        if task.file:
            (self.tree / task.file).write_text(task.text, encoding="utf-8")
        self.task, self.began = task, time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            try:
                _test(self.tree, self.notes, task)
            finally:
                os._exit(99)

    def poll(self, known: dict[str, float]) -> Outcome | None:
        """The outcome if there is one by now."""
        assert self.task is not None
        running, late = self._running(), False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            note = self.notes / "running"
            since = time.time() - note.stat().st_mtime if note.exists() else time.monotonic() - self.began - LOADING
            # Without a mutant tests may take as long as they like.
            if not (late := bool(self.task.file) and since > self.patience + SLOWER * known.get(running, 0.0)):
                return None
        self._end(reap=not pid)
        failed = self.notes / "failed"
        code = os.waitstatus_to_exitcode(status) if pid else 0
        code = 0 if code == NO_TESTS else code
        outcome = "timed out" if late else "killed" if code else "survived"
        by = failed.read_text() if failed.exists() else running if late or code else ""
        written = self.notes / "seen"
        seen = json.loads(written.read_text()) if written.exists() else ({}, {})
        log = (self.notes / "log").read_text(errors="replace") if code else ""
        task, self.task = self.task, None
        if task.file:
            shutil.copyfile(self.project.root / task.file, self.tree / task.file)
        durations, entered = seen
        took = round(time.monotonic() - self.began, 1)
        return Outcome(task.key, outcome, by, took, durations, entered, log[-3000:])

    def _running(self) -> str:
        seen = self.notes / "running"
        return seen.read_text() if seen.exists() else ""

    def _end(self, *, reap: bool) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if reap:
            # It has no group of its own in its first moment.
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def close(self) -> None:
        if self.task is not None:
            self._end(reap=True)


def work(workers: Sequence[Worker], tasks: Sequence[Task], known: dict[str, float]) -> Iterator[Outcome]:
    """Do all tasks, and yield each outcome as it comes."""
    waiting = list(tasks)[::-1]
    while waiting or any(worker.task for worker in workers):
        for worker in workers:
            if worker.task is None and waiting:
                worker.start(waiting.pop())
            if worker.task is not None and (outcome := worker.poll(known)):
                yield outcome
        time.sleep(PAUSE)


def _test(tree: Path, notes: Path, task: Task) -> None:
    """Run pytest in this forked process, and end it."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    log = os.open(notes / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "src")
    for name in [name for name in sys.modules if name.split(".")[0] == "support"]:
        del sys.modules[name]
    here = Path(__file__).resolve().parents[2]
    sys.path[:] = [str(tree / "src"), *(place for place in sys.path if Path(place or ".").resolve() != here)]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", WHOLE_EXPERIMENTS]
    watch = _Watch(notes, None if task.file else tree / "src")
    code = pytest.main([*options, *task.tests], plugins=[watch])
    sys.stdout.flush()
    os._exit(int(code))
