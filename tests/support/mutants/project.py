"""Which tests look at a package: those of its own room, and those that import it, if only through others."""

from __future__ import annotations

import ast
import hashlib
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "shared", "maecho-*", "dist")
READ_SOURCES = {"tests/test_house.py", "tests/test_mutants.py"}
"""Tests that read how the source is written. They would not notice what it does."""
BESIDE = "root"
"""The name here of the modules that stand beside the packages."""


@dataclass(frozen=True)
class Project:
    """A source tree with `src/NAME` and `tests`."""

    root: Path
    name: str

    def sources(self, package: str) -> list[str]:
        """The package's modules, relative to the root."""
        folder = self.root / "src" / self.name
        found = folder.glob("*.py") if package == BESIDE else (folder / package).rglob("*.py")
        if not (files := sorted(path.relative_to(self.root).as_posix() for path in found)):
            raise SystemExit(f"no package {package!r} in {self.name}")
        return files

    def own_tests(self, package: str) -> list[str]:
        folder = self.root / "tests"
        found = folder.glob("test_*.py") if package == BESIDE else (folder / package).rglob("test_*.py")
        return sorted({path.relative_to(self.root).as_posix() for path in found} - READ_SOURCES)

    def other_tests(self, file: str, package: str) -> list[str]:
        """Tests elsewhere whose imports lead to this file."""
        others = {p.relative_to(self.root).as_posix() for p in (self.root / "tests").rglob("test_*.py")}
        others -= READ_SOURCES | set(self.own_tests(package))
        return sorted(test for test in others if file in self._reached(test))

    def digest(self) -> str:
        """Changes with any Python file of the tree."""
        files = sorted(path for top in ("src", "tests") for path in (self.root / top).rglob("*.py"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]

    def _reached(self, start: str) -> set[str]:
        found, waiting = {start}, [start]
        while waiting:
            new = self._imports[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        """For every file the files that it imports, in `src` and in `tests`."""
        names, homes = dict[str, str](), dict[str, str]()
        for top in ("src", "tests"):
            for path in (self.root / top).rglob("*.py"):
                parts = path.relative_to(self.root / top).with_suffix("").parts
                names[".".join(parts).removesuffix(".__init__")] = path.relative_to(self.root).as_posix()
        found = {file: set[str]() for file in names.values()}
        front = f"src/{self.name}/__init__.py"
        for file in sorted(found, key=lambda file: file != front):
            for node in ast.walk(ast.parse((self.root / file).read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    wanted = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    # `from maecho import X` leads to the home of X alone.
                    here = [f"{node.module}.{alias.name}" for alias in node.names]
                    if file == front:
                        homes |= {f"{self.name}.{alias.name}": str(node.module) for alias in node.names}
                    wanted = [homes.get(name, name) for name in here]
                    if node.module != self.name:
                        wanted.append(str(node.module))
                else:
                    continue
                found[file] |= {names[name] for name in wanted if name in names}
            if file.startswith("tests/"):
                beside = (Path(file).parent / "conftest.py").as_posix()
                found[file] |= {name for name in (beside, "tests/conftest.py") if name in found and name != file}
        return found
