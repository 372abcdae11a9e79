"""Loads a user's own network and data, which the command line names as `package.module:factory`."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from maecho.errors import InputError
from maecho.upload import storage as files
from maecho.upload.upload import Upload


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
        raise InputError(f"{what} must be named package.module:factory, got {name!r}")
    _search_here()
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, SyntaxError) as error:
        raise InputError(f"{what}: cannot import {module_name!r}: {error}") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise InputError(f"{what}: {module_name!r} must have a function {factory_name!r}, got none")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise InputError(f"{what}: {name} must be a function without arguments, got one that has ({error})") from error
    return factory()


def model(name: str, weights: Path | None = None) -> nn.Module:
    """A factory's model. If `weights` is given, it is the file of an upload, of a merged model or of any safetensors
    state_dict, and its weights are loaded."""
    made = call(name, "model")
    if not isinstance(made, nn.Module):
        raise InputError(f"model: {name} must return a torch.nn.Module, got {type(made).__name__}")
    if weights is not None:
        if weights.suffix in {".pt", ".pth", ".bin", ".ckpt"}:
            raise InputError(
                f"weights must be a safetensors file, got {weights}, which is a pickle and could run code; convert it "
                "with safetensors.torch.save_file"
            )
        load_weights(made, weights)
    return made


def load_weights(made: nn.Module, path: Path) -> None:
    """Load the weights of a file into a model."""
    try:
        made.load_state_dict(_state_dict(path))
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise InputError(f"{path} must hold the weights of this model, got others: {first}") from error


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The weights of any safetensors file. For an upload, tied names are included."""
    with files.opened(path) as file:
        if file.kind != "upload":
            return file.read_all()
    return Upload.load(path, only=()).state_dict()


def batches(name: str) -> Iterable[Any]:
    """A factory's batches."""
    made = call(name, "data")
    if not isinstance(made, Iterable):
        raise InputError(f"data: {name} must return an iterable of batches, got {type(made).__name__}")
    return made
