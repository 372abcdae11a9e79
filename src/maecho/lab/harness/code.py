"""The identity of code: a hash of the definitions that a result depends on.

It starts at some definitions of the package. It looks up every name in them, finds the functions, classes and constants
that these names stand for, and goes on from there. A class counts as a whole. Docstrings, comments and layout do not
count. So a result is out of date if a line that it depends on changes, and stays up to date if any other line does.

Tables of alternatives (METHODS, STATISTICS, NETWORKS, …) are not followed. The caller gives the rows that are used.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Name = tuple[str, str]
"""A module, and a name at its top level."""

PACKAGE = __name__.split(".", maxsplit=1)[0]
TABLES = {
    ("maecho.aggregation", "METHODS"),
    ("maecho.statistics", "STATISTICS"),
    ("maecho.lab.networks", "NETWORKS"),
    ("maecho.lab.data", "DATASETS"),
    ("maecho.lab.harness.columns", "KINDS"),
}
NO_NUMBERS = {
    f"{PACKAGE}.{name}"
    for name in ("_version", "disk", "errors", "formatting", "names", "options", "progress", "schema")
} | {f"{PACKAGE}.upload.{name}" for name in ("envelope", "header", "storage", "version_1")}
"""Modules that write files, check, format or show progress. They change no number, so they do not count."""


@dataclass(frozen=True)
class Code:
    """What a result depends on."""

    digest: str
    modules: Mapping[str, str]
    """Module -> digest of its definitions that are used."""

    @classmethod
    def of(cls, *roots: Any) -> Code:
        """The code behind these functions and classes, or (module, name) pairs."""
        return _code(frozenset(root if isinstance(root, tuple) else _home(root) for root in roots))


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The names, within the package, of all modules whose digests differ between `old` and `new`."""
    names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    return sorted(name.removeprefix(f"{PACKAGE}.") for name in names)


@cache
def _code(roots: frozenset[Name]) -> Code:
    found: set[Name] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found or name in TABLES or name[0] in NO_NUMBERS:
            continue
        found.add(name)
        waiting += _module(name[0]).uses(name[1])
    by_module = defaultdict(list)
    for module, one in sorted(found):
        by_module[module].append([one, _module(module).content(one)])
    modules = {module: _digest(content) for module, content in by_module.items()}
    return Code(_digest(modules), modules)


class _Module:
    """The top level of one module: definitions by name, what its imports mean, and what stands beside them."""

    def __init__(self, name: str, text: str):
        self.name = name
        self.definitions = defaultdict[str, list[ast.stmt]](list)
        self.imports: dict[str, tuple[str, str | None]] = {}
        """Local name -> the module, and the name in it; None for a module itself."""
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imports |= {a.asname or a.name.split(".")[0]: (a.name, None) for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
        self.loose: list[ast.stmt] = []
        self._used: dict[str, list[Name]] = {}
        self._content: dict[str, str] = {}
        for statement in tree.body:
            names = _defined(statement)
            for defined in names:
                self.definitions[defined].append(statement)
            if not names and not isinstance(statement, (ast.Import, ast.ImportFrom)) and not _is_text(statement):
                self.loose.append(statement)

    def statements(self, name: str) -> list[ast.stmt]:
        """The definition itself, what is registered with it by a decorator, and what the module runs when imported."""
        own = self.definitions.get(name, [])
        registered = [
            statement
            for statements in self.definitions.values()
            for statement in statements
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and statement not in own
            if any(name in _names(decorator) for decorator in statement.decorator_list)
        ]
        return [*own, *registered, *self.loose]

    def content(self, name: str) -> str:
        """A digest of all that defines the name."""
        if name not in self._content:
            self._content[name] = _digest([_plain(statement) for statement in self.statements(name)])
        return self._content[name]

    def uses(self, name: str) -> list[Name]:
        """What the definition refers to, each where it is defined."""
        if name not in self._used:
            nodes = [node for statement in self.statements(name) for node in ast.walk(statement)]
            names = {(node.id, None) for node in nodes if isinstance(node, ast.Name)} | {
                (node.value.id, node.attr)
                for node in nodes
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            }
            self._used[name] = sorted({meant for one in names for meant in self.meaning(*one)})
        return self._used[name]

    def meaning(self, name: str, attribute: str | None = None) -> Iterator[Name]:
        if name in self.definitions:
            yield self.name, name
        elif name in self.imports:
            module, inner = self.imports[name]
            if module.split(".")[0] != PACKAGE:
                return
            if inner is not None and _source(f"{module}.{inner}") is not None:
                module, inner = f"{module}.{inner}", None
            wanted = inner or attribute
            if wanted is not None and _source(module) is not None:
                there = _module(module)
                yield from [(module, wanted)] if wanted in there.definitions else there.meaning(wanted)


@cache
def _module(name: str) -> _Module:
    path = _source(name)
    assert path is not None
    return _Module(name, path.read_text(encoding="utf-8"))


@cache
def _source(name: str) -> Path | None:
    """The file of a module; None if there is no such module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _home(root: Any) -> Name:
    return root.__module__, root.__qualname__.split(".")[0]


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return [statement.name]
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _plain(node: Any) -> Any:
    """A syntax tree as lists, without docstrings; the same for every version of Python."""
    if isinstance(node, ast.AST):
        fields = {
            key: _plain(value)
            for key, value in ast.iter_fields(node)
            if value not in (None, []) and key not in ("ctx", "type_comment")
        }
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_plain(one) for one in node if not _is_text(one)]
    return node if isinstance(node, (str, int, bool)) else repr(node)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
