"""`python -m support.mutants` tests a sample of the mutants of one package, and writes what came of each into a file.

A run that was stopped goes on where it was: a result holds as long as its source file is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.mutants import report
from support.mutants.pool import Task, Worker, work
from support.mutants.project import Project
from support.mutants.sites import Mutant, find

ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.mutants")
    parser.add_argument("package", nargs="?", help="a package of src/maecho; `root`: the modules beside them")
    parser.add_argument("--sample", type=int, default=50, help="how many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reach", choices=("room", "all"), default="all", help="room: only the package's own tests")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--patience", type=float, default=20, help="seconds for any test, beside five times its usual")
    parser.add_argument("--again", action="store_true", help="test the survivors of earlier runs again")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--name", default="maecho")
    parser.add_argument("--preload", default="torch,safetensors.torch,sklearn", help="modules that are loaded once")
    parser.add_argument("--results", type=Path, help="a folder (docs/mutants)")
    parser.add_argument("--table", type=Path, help="write the table of all results into this page, and test nothing")
    chosen = parser.parse_args()
    results = chosen.results or chosen.root / "docs" / "mutants"
    if chosen.table:
        report.write(chosen.table, results)
        return
    if not chosen.package:
        parser.error("name a package")
    # Before torch is loaded: a process that has threads cannot be forked.
    os.environ.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    for module in filter(None, chosen.preload.split(",")):
        importlib.import_module(module)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
        project = Project(chosen.root.resolve(), chosen.name)
        run = Run(project, chosen.package, results / f"{chosen.package}.json", chosen)
        for number in range(chosen.jobs):
            run.workers.append(Worker(project, folder / str(number), chosen.patience))
            stack.callback(run.workers[-1].close)
        run.room()
        if chosen.reach == "all":
            run.everywhere()
    print(report.summary(json.loads(run.path.read_text())))


class Run:
    """The sample of one package, and its results so far."""

    def __init__(self, project: Project, package: str, path: Path, chosen: argparse.Namespace) -> None:
        self.project, self.package, self.path = project, package, path
        self.workers: list[Worker] = []
        self.sources = {file: (project.root / file).read_text("utf-8") for file in project.sources(package)}
        every = [mutant for file, text in self.sources.items() for mutant in find(file, text)]
        self.sample: list[Mutant] = []
        for mutant in sorted(every, key=lambda mutant: mutant.rank(chosen.seed)):
            if len(self.sample) < chosen.sample and mutant.changes(self.sources[mutant.file]):
                self.sample.append(mutant)
        self.head = {"package": package, "seed": chosen.seed, "mutants": len(every)}
        earlier = json.loads(path.read_text("utf-8"))["results"] if path.exists() else []
        digests = {file: _digest(text) for file, text in self.sources.items()}
        names = {mutant.name for mutant in self.sample}
        self.results: dict[str, dict[str, Any]] = {
            result["name"]: result
            for result in earlier
            if result["name"] in names and result["source"] == digests[result["file"]]
            if not (chosen.again and result["outcome"] == "survived")
        }
        self.usual: dict[str, Any] = {}
        self.known: dict[str, float] = {}

    def room(self) -> None:
        """Test what has no result with the package's own tests."""
        self._save()
        tests = self.project.own_tests(self.package)
        open_ = [i for i, mutant in enumerate(self.sample) if mutant.name not in self.results]
        self._test([Task(i, tests, *self._mutated(i)) for i in open_], "room")

    def everywhere(self) -> None:
        """Test what survived in its own room with all other tests that lead to its file."""
        tasks = []
        for i, mutant in enumerate(self.sample):
            result = self.results[mutant.name]
            if result["outcome"] == "survived" and result["reach"] == "room":
                tasks.append(Task(i, self.project.other_tests(mutant.file, self.package), *self._mutated(i)))
        self._test(tasks, "all")

    def _mutated(self, i: int) -> tuple[str, str]:
        mutant = self.sample[i]
        return mutant.file, mutant.apply(self.sources[mutant.file])

    def _test(self, tasks: list[Task], reach: str) -> None:
        self._without_mutants({test for task in tasks for test in task.tests})
        chosen = [Task(task.key, self._entering(task), task.file, task.text) for task in tasks]
        for task in chosen:
            if not task.tests:
                self._record(task.key, reach, "survived", "", 0.0)
        for outcome in work(self.workers, [task for task in chosen if task.tests], self.known):
            mutant = self.sample[outcome.key]
            self._record(outcome.key, reach, outcome.outcome, outcome.by, outcome.seconds)
            print(f"{outcome.outcome:10} {outcome.seconds:6.1f} s  {mutant.name}", flush=True)

    def _without_mutants(self, files: set[str]) -> None:
        """Tests must pass. This is how long they take, and these functions run in them; known until a file changes."""
        cache, digest = self.project.root / ".mutants.json", self.project.digest()
        kept = json.loads(cache.read_text()) if cache.exists() else {}
        self.usual = kept["usual"] if kept.get("digest") == digest else {}
        missing = sorted(files - self.usual.keys())
        for outcome in work(self.workers, [Task(i, [file]) for i, file in enumerate(missing)], {}):
            file = missing[outcome.key]
            if outcome.outcome != "survived":
                raise SystemExit(f"{file} fails without a mutant: {outcome.by}\n{outcome.log}")
            self.usual[file] = {"durations": outcome.durations, "entered": outcome.entered}
            cache.write_text(json.dumps({"digest": digest, "usual": self.usual}))
        self.known = {test: seconds for usual in self.usual.values() for test, seconds in usual["durations"].items()}

    def _entering(self, task: Task) -> list[str]:
        """The test files that run the mutant's function, the quickest first; outside of functions any in its file."""
        function = self.sample[task.key].function
        lines = {test: self.usual[test]["entered"].get(task.file, []) for test in task.tests}
        entering = [test for test in task.tests if (function in lines[test] if function else lines[test])]
        return sorted(entering, key=lambda test: sum(self.usual[test]["durations"].values()))

    def _record(self, i: int, reach: str, outcome: str, by: str, seconds: float) -> None:
        mutant = self.sample[i]
        text = self.sources[mutant.file]
        self.results[mutant.name] = {
            "name": mutant.name, "file": mutant.file, "line": mutant.line, "kind": mutant.kind, "outcome": outcome,
            "reach": reach, "by": by, "seconds": seconds, "source": _digest(text), "diff": mutant.diff(text),
        }  # fmt: skip
        self._save()

    def _save(self) -> None:
        """Write the file whole, so that a run that is killed leaves one that can be read."""
        ordered = [self.results[mutant.name] for mutant in self.sample if mutant.name in self.results]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text(json.dumps({**self.head, "results": ordered}, indent=1, ensure_ascii=False) + "\n", "utf-8")
        part.replace(self.path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
