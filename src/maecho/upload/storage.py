"""Safetensors files that are whole or absent: written under a temporary name and renamed, never pickled.

Each carries one JSON text under the key `maecho` that says what it is and how it was made.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from maecho.errors import UploadError

KEY = "maecho"
VERSION = 1
"""Of the file format. Raised when an older maecho could not read what a newer one writes, from the first release on."""


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary name beside `path`, then rename: a crash leaves the old file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
    except OSError as error:
        raise UploadError(f"cannot write {path}: {error.strerror}") from error
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)  # mkstemp's files are for their owner alone; this one travels
        temporary.replace(path)
    except OSError as error:
        raise UploadError(f"cannot write {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UploadError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_whole(path, lambda name: name.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8"))


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """`kind` says what the file is: "upload" or "model"."""
    header = {KEY: json.dumps({"kind": kind, "version": VERSION, **about})}
    flat: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        flat[name] = tensor.clone() if place in places else tensor  # safetensors refuses memory that is shared
        places.add(place)
    write_whole(path, lambda name: save_file(flat, name, metadata=header))


def read_about(path: Path, kind: str) -> dict[str, Any]:
    """The JSON of a file of this kind, without its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    try:
        about = json.loads(header[KEY])
        found, version = about["kind"], about["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise UploadError(
            f"{path} must be a maecho {kind}, got a safetensors file that maecho did not write"
        ) from error
    if found != kind:
        raise UploadError(f"{path} must be a maecho {kind}, got a maecho {found}")
    if not isinstance(version, int) or version > VERSION:
        raise UploadError(f"{path} must be of file format {VERSION} or older, got {version}: it needs a newer maecho")
    return dict(about)


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The tensors whose names are wanted; the others are not read from disk."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118 (no iterator)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights of any safetensors file: an upload's are under their prefix, with tied names beside."""
    tensors = read_tensors(path)
    if not any(name.startswith("weights/") for name in tensors):
        return tensors
    about = read_about(path, "upload")
    weights = {name.removeprefix("weights/"): t for name, t in tensors.items() if name.startswith("weights/")}
    return weights | {name: weights[kept] for name, kept in about.get("aliases", {}).items() if kept in weights}


def _unreadable(path: Path, error: Exception) -> UploadError:
    if isinstance(error, FileNotFoundError):
        return UploadError(f"{path} must be a file, got nothing at that place")
    if isinstance(error, OSError) and path.is_dir():
        return UploadError(f"{path} must be a file, got a folder")
    return UploadError(f"{path} must be a whole safetensors file, got one that is cut short or foreign ({error})")
