"""Loads a user's own network and data, which the command line names as `package.module:factory`."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from maecho.cli import weights as files
from maecho.errors import InputError, text_of

LISTED = 8
"""So many names are listed at most."""


def sources(*names: str | None) -> list[Path]:
    """The files of the modules that hold these factories. A module that is not found has none; `call` says why."""
    _search_here()
    found = []
    for name in names:
        with contextlib.suppress(ImportError, TypeError, ValueError, AttributeError, SyntaxError):
            spec = None if name is None else importlib.util.find_spec(name.partition(":")[0])
            found += [Path(spec.origin)] if spec is not None and spec.has_location and spec.origin else []
    return found


def _search_here() -> None:
    """Let imports search the current folder first, as `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def call(name: str, what: str) -> Any:
    """Call a factory and return its result."""
    module_name, colon, factory_name = name.partition(":")
    if not (module_name and colon and factory_name):
        raise InputError(f"{what} must be named package.module:factory, got {name!r}{_meant(name)}")
    _search_here()
    if module_name.endswith(".py") and Path(module_name).is_file():
        dotted = module_name.removesuffix(".py").replace("/", ".")
        raise InputError(f"{what} must be named package.module:factory, got {name!r}; write {dotted}:{factory_name}")
    module = _module(module_name, what)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise InputError(
            f"{what}: {module_name!r} must have a function {factory_name!r}, got none"
            f"{_hint(factory_name, _functions(module), 'its functions')}"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise InputError(f"{what}: {name} must be a function without arguments, got one that has ({error})") from error
    try:
        return factory()
    except InputError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise InputError(f"{what}: {name} must return without an error, got {_described(error)}") from error


def _module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, TypeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        hint = _hint(name, _modules_here(), "the modules of this folder") if missing else ""
        raise InputError(f"{what}: cannot import {name!r}: {text_of(error)}{hint}") from error
    except Exception as error:  # the user's own code may raise anything
        raise InputError(f"{what}: cannot import {name!r}: {_described(error)}") from error


def _described(error: Exception) -> str:
    """An error of the user's own code: its kind, what it says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text_of(error)}{where}; MAECHO_DEBUG=1 shows all of it"


def _meant(name: str) -> str:
    """A hint for a name without a colon: a module's functions, or the colon in the place of the last dot."""
    _search_here()
    module, _, function = name.rstrip(":").rpartition(".")
    for whole, asked in ((name.rstrip(":"), ""), (module, function)):
        with contextlib.suppress(Exception):  # it is a hint only, and the user's own code may raise anything
            functions = _functions(importlib.import_module(whole)) if whole else []
            if asked in functions:
                return f"; write {whole}:{asked}"
            if functions and not asked:
                return f"; write {whole}:function, with one of its functions ({_listed(functions)})"
    return ""


def _functions(module: ModuleType) -> list[str]:
    """The functions and classes that a module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _modules_here() -> list[str]:
    """The modules and packages in the current folder."""
    with contextlib.suppress(OSError):
        found = [path.stem for path in Path().glob("*.py")] + [
            path.parent.name for path in Path().glob("*/__init__.py")
        ]
        return sorted(name for name in found if name.isidentifier() and not name.startswith("_"))
    return []


def _hint(name: str, known: Sequence[str], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; {what} are {_listed(known)}" if known else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def model(name: str, weights: Path | None = None) -> nn.Module:
    """A factory's model. If `weights` is given, it is the file of an upload, of a merged model, of any safetensors
    state_dict or of torch.save, and its weights are loaded."""
    made = call(name, "model")
    if not isinstance(made, nn.Module):
        raise InputError(f"model: {name} must return a torch.nn.Module, got {type(made).__name__}")
    if weights is not None:
        files.load(made, weights)
    return made


def batches(name: str) -> Iterable[Any]:
    """A factory's batches."""
    made = call(name, "data")
    if not isinstance(made, Iterable):
        raise InputError(f"data: {name} must return an iterable of batches, got {type(made).__name__}")
    return made


def clients(name: str) -> list[tuple[nn.Module, Iterable[Any]]]:
    """A factory's clients: pairs of a trained model and its batches."""
    made = call(name, "clients")
    pairs = list(made) if isinstance(made, Iterable) else None
    if pairs is None or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        got = (
            type(made).__name__ if pairs is None else f"a list of {', '.join({type(pair).__name__ for pair in pairs})}"
        )
        raise InputError(f"clients: {name} must return pairs of a model and its batches, got {got}")
    return [(own, data) for own, data in pairs]
