"""Converts the arguments of the command line, and checks where it may write."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

from maecho import disk
from maecho.aggregation import METHODS, choose
from maecho.errors import InputError


class By(StrEnum):
    """The ways in which an ensemble combines its models' outputs."""

    logits = "logits"
    probabilities = "probabilities"
    class_aware = "class-aware"


class Labels(StrEnum):
    """The labels that gradients are computed for."""

    expected = "expected"
    sampled = "sampled"
    observed = "observed"


_NEW: list[Path] = []
"""Folders that did not exist when a command was told to write into them."""


def check_folder(folder: Path, option: str = "--out") -> None:
    """Raise InputError if a folder neither exists nor can be made. This runs before any work is done."""
    there = next((one for one in (folder, *folder.parents) if os.path.lexists(one)), Path())
    if not there.is_dir():
        raise InputError(f"{option} must lie in a folder, got {folder}, where {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into {folder}: {option} needs the permission to write in {there}, got none")
    if there != folder:
        _NEW.append(folder)


def made_folders() -> list[Path]:
    """The folders that commands made since the last call."""
    found = [folder for folder in dict.fromkeys(_NEW) if folder.is_dir()]
    _NEW.clear()
    return found


def check_out(out: Path, force: bool, inputs: Iterable[Path] = (), option: str = "--out") -> None:
    """Raise InputError if a result may not be written to `out`. This runs before any work is done.

    An input is never replaced, whatever name it has. Another existing file is replaced only with --force.
    """
    try:
        for path in inputs:
            if path.exists() and out.exists() and out.samefile(path):
                raise InputError(f"{option} must not be one of the inputs, got {out}, which is {path}")
        if out.is_symlink() or (out.exists() and not out.is_file()):
            raise InputError(
                f"cannot write {out}: {option} must name a regular file, got {disk.kind(out.lstat().st_mode)}"
            )
        if out.exists() and not force:
            raise InputError(f"cannot write {out}: it must be a new file, got one that exists; --force replaces it")
        check_folder(out.parent, option)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error


def permissions(text: str) -> int:
    """Read octal digits, as for `chmod`. The owner must be able to read and to replace the file."""
    if not re.fullmatch(r"0?6[0246]{2}", text):
        raise InputError(f"--mode must be 600, 640, 644 or similar, got {text!r}")
    return int(text, 8)


def rank(text: str) -> int | float | str | dict[str, int] | None:
    """Read a rank: a number, one for each layer as JSON, a share of energy, or a size as text. "all" gives None."""
    if text == "all":
        return None
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return number if isinstance(number, int | float | dict) else text


def words(text: str | None) -> list[str] | None:
    """Split a text at its commas."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def defaults(method: Any) -> dict[str, Any]:
    """The options of a method with their defaults."""
    return {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.repr}


def options(method: str, texts: Iterable[str]) -> dict[str, Any]:
    """Read options of the form name=value. A value is read as JSON (60, 0.5, true, null) if it is JSON, else text."""
    choose(method)
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set must be name=value, got {text!r}")
        known = defaults(METHODS[method])
        if name not in known:
            raise InputError(f"{method} has the options {', '.join(known)}, got {name!r}")
        found[name] = parsed(value)
    return found


def parsed(text: str) -> Any:
    """A value as JSON (60, 0.5, true, null) if it is JSON, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
