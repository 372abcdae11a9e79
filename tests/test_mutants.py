"""`make mutants` finds small errors, tells which of them tests notice, and never touches the source."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.mutants import report
from support.mutants.project import Project
from support.mutants.sites import find

TESTS = Path(__file__).resolve().parent
SOURCES = sorted((TESTS.parent / "src").rglob("*.py"))

SOURCE = '''"""Sums."""

def total(values, start=0):
    """Not changed: 1 + 1."""
    for value in values:
        start += value
    return start


def unseen(value):
    return value * 3


def count(n):
    i = 0
    while i < n:
        i += 1
    return i
'''
OWN = """from toy.room.sums import count, total

def test_it():
    assert total([1, 2]) == 3
    assert count(2) == 2
"""
OTHER = "from toy.room import sums\n\n\ndef test_it():\n    assert sums.unseen(2) == 6\n"


def changes(line: str) -> set[str]:
    """Every mutant of one line of code, as code."""
    mutants = find("file.py", line)
    assert all(mutant.changes(line) for mutant in mutants)
    return {mutant.apply(line) for mutant in mutants}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a + b", {"a - b"}),
        ("é * (b)", {"é / (b)"}),
        ("a @ b.mT", {"a * b.mT", "a @ (b)"}),
        ("a < b <= c", {"a <= b <= c", "a < b < c"}),
        ("a is not b", {"a is b"}),
        ("a not in b", {"a in b"}),
        ("a and b or c", {"a or b or c", "a and b and c"}),
        ("not a", {"(a)"}),
        ("-a", {"(a)"}),
        ("x = [0, 1, 5, 0.5, 0.0, True]",
         {f"x = [{new}]" for new in ("1, 1, 5, 0.5, 0.0, True", "0, 0, 5, 0.5, 0.0, True",
                                     "0, 1, (5 + 1), 0.5, 0.0, True", "0, 1, 5, (0.5 * 10), 0.0, True",
                                     "0, 1, 5, 0.5, 1.0, True",
                                     "0, 1, 5, 0.5, 0.0, False")}),
        ("x = a if b else c", {"x = a if (not (b)) else c"}),
        ("x = a if b == c else d", {"x = a if b != c else d"}),
        ("x += y", {"pass", "x -= y"}),
        ("f(a, b=c)", {"pass"}),
        ("x = f(a, b, *c)", {"x = f(b, a, *c)"}),
        ("x = y.sum(dim=-1)", {"x = y.mean(dim=-1)", "x = y.sum(dim=-2)"}),
        ("x = max(y)", {"x = min(y)"}),
        ("x = sum(y)", set()),
        ("def f(a: L[1], b: int = 7) -> L[2]: ...", {"def f(a: L[1], b: int = (7 + 1)) -> L[2]: ..."}),
        ("rate: Annotated[float, 2] = 1.5", {"rate: Annotated[float, 2] = (1.5 * 10)"}),
        ("def __repr__(self): return 1 + 1", set()),
        ("raise ValueError(1 + 1)", set()),
        ("x = InputError(f'{1 + 1}')", set()),
        ("x = f'{1 + 1}'", set()),
        ("@dataclass(frozen=True)\nclass A: ...", set()),
        ("x = field(repr=False)", set()),
        ("x = zip(*y, strict=True)", set()),
        ('"""1 + 1"""', set()),
    ],
)  # fmt: skip
def test_what_is_changed(line: str, expected: set[str]) -> None:
    assert changes(line) == expected


@pytest.mark.parametrize("path", SOURCES[::6], ids=lambda path: path.stem)
def test_every_mutant_of_the_library_is_another_program(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    original = ast.dump(ast.parse(source))
    mutants = find("file.py", source)
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants[::5]:
        assert ast.dump(ast.parse(mutant.apply(source))) != original, mutant.name


def test_a_sample_stays_when_lines_move() -> None:
    moved = find("file.py", "# more\n\n" + SOURCE)
    assert [mutant.rank(0) for mutant in find("file.py", SOURCE)] == [mutant.rank(0) for mutant in moved]
    assert [mutant.rank(1) for mutant in moved] != [mutant.rank(0) for mutant in moved]


def test_a_diff_shows_the_line() -> None:
    (mutant,) = (mutant for mutant in find("file.py", SOURCE) if mutant.kind == "comparison")
    assert "-    while i < n:\n+    while i <= n:" in mutant.diff(SOURCE)
    assert mutant.line == 16


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    files = {
        "src/toy/__init__.py": "", "src/toy/room/__init__.py": "", "src/toy/room/sums.py": SOURCE,
        "tests/room/test_sums.py": OWN, "tests/other/test_other.py": OTHER,
        "tests/other/test_apart.py": "def test_it():\n    assert True\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def command(toy: Path, *more: str) -> list[str]:
    fixed = ["room", "--root", str(toy), "--name", "toy", "--preload", "", "--results", str(toy / "results")]
    return [sys.executable, "-m", "support.mutants", *fixed, *more]


def run(toy: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(command(toy, *more), env=environment, capture_output=True, text=True, check=False)


def results(toy: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((toy / "results" / "room.json").read_text())["results"]
    return found


def outcomes(toy: Path, scope: str) -> set[tuple[str, str]]:
    return {(r["outcome"], r["by"].split("::")[0]) for r in results(toy) if f".py:{scope}:" in r["name"]}


def test_who_tests_a_file(toy: Path) -> None:
    project = Project(toy, "toy")
    assert project.sources("room") == ["src/toy/room/__init__.py", "src/toy/room/sums.py"]
    assert project.own_tests("room") == ["tests/room/test_sums.py"]
    assert project.other_tests("src/toy/room/sums.py", "room") == ["tests/other/test_other.py"]
    with pytest.raises(SystemExit, match="no package 'cellar' in toy"):
        project.sources("cellar")


@pytest.mark.slow
def test_a_mutant_that_breaks_a_test_is_killed(toy: Path) -> None:
    source = toy / "src/toy/room/sums.py"
    source.write_text(SOURCE[: SOURCE.index("def count")])
    (toy / "tests/room/test_sums.py").write_text(OWN.replace("count, ", "").replace("    assert count(2) == 2\n", ""))
    before = source.read_bytes()
    done = run(toy, "--reach", "room")
    assert done.returncode == 0, done.stderr
    assert outcomes(toy, "total") == {("killed", "tests/room/test_sums.py")}
    assert outcomes(toy, "unseen") == {("survived", "")}
    assert "+    return value / 3" in done.stdout
    # What survived in its own room is looked at by the others, and nothing is done twice.
    done = run(toy)
    assert outcomes(toy, "unseen") == {("killed", "tests/other/test_other.py")}
    assert "total" not in done.stdout
    assert run(toy).stdout == "room: 5 mutants of 5: 5 killed, 0 timed out, 0 survived\n"
    assert source.read_bytes() == before
    assert "| `room` | 5 | 5 | 5 | 0 | 0 | 100 % | all that import it |" in report.table(toy / "results")
    # A result holds only for the source that it was found with.
    source.write_text(source.read_text() + "\n# more\n")
    assert "total" in run(toy, "--reach", "room").stdout


@pytest.mark.slow
def test_a_mutant_that_never_ends_is_stopped(toy: Path) -> None:
    done = run(toy, "--reach", "room", "--patience", "1.5")
    assert done.returncode == 0, done.stderr
    assert ("timed out", "tests/room/test_sums.py") in outcomes(toy, "count")
    assert ("killed", "tests/room/test_sums.py") in outcomes(toy, "count")


@pytest.mark.slow
def test_killed_in_the_middle_it_leaves_the_source_alone(toy: Path) -> None:
    before = {path: path.read_bytes() for path in toy.rglob("*.py")}
    scratch = toy / ".scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(scratch)}
    arguments = command(toy, "--reach", "room", "--jobs", "1", "--patience", "1")
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert any(scratch.iterdir()), "the run had ended"
    assert {path: path.read_bytes() for path in before} == before
    assert results(toy)


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_named(toy: Path) -> None:
    (toy / "tests/room/test_sums.py").write_text("def test_it():\n    assert 1 == 2\n")
    done = run(toy)
    assert done.returncode == 1
    assert "tests/room/test_sums.py fails without a mutant: tests/room/test_sums.py::test_it" in done.stderr


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(page, tmp_path)
    assert page.read_text() == f"before\n{report.BEGIN}\n{report.table(tmp_path)}\n{report.END}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="one place for the table expected, 0 found"):
        report.write(page, tmp_path)


@pytest.mark.slow
def test_only_tests_that_run_the_function_are_asked(toy: Path) -> None:
    """`unseen` is entered by one file, so another that fails for every mutant is not asked about it."""
    (toy / "tests/other/test_total.py").write_text(
        "from pathlib import Path\nfrom toy.room import sums\n\n\ndef test_it():\n    sums.total([1])\n"
        "    assert 'value * 3' in Path(sums.__file__).read_text()\n"
    )
    (toy / "tests/other/test_other.py").write_text(
        "from toy.room import sums\n\n\ndef test_it():\n    sums.unseen(2)\n"
    )
    (toy / "src/toy/room/sums.py").write_text(SOURCE[: SOURCE.index("def count")])
    (toy / "tests/room/test_sums.py").unlink()
    run(toy)
    assert outcomes(toy, "unseen") == {("survived", "")}
    assert {test for _, test in outcomes(toy, "total")} == {""}
    usual = json.loads((toy / ".mutants.json").read_text())["usual"]
    # The first line of a module counts too: it is entered when it is imported.
    assert usual["tests/other/test_total.py"]["entered"]["src/toy/room/sums.py"] == [1, 3]
    assert usual["tests/other/test_other.py"]["entered"]["src/toy/room/sums.py"] == [1, 10]


def test_the_page_has_the_table_of_the_committed_results() -> None:
    docs = TESTS.parent / "docs"
    assert f"{report.BEGIN}\n{report.table(docs / 'mutants')}\n{report.END}" in (docs / "testing.md").read_text("utf-8")
