"""Finds data sets and weights in one folder, which MAECHO_DATA names. Nothing is downloaded into it."""

from __future__ import annotations

import os
from pathlib import Path

from maecho.errors import InputError


class MissingDataError(InputError, FileNotFoundError):
    """A file of a data set, or of weights, is missing. The message says which file, and where to get it."""


def data_folder() -> Path:
    """The folder that MAECHO_DATA names, or ~/.cache/maecho/data."""
    return Path(os.environ.get("MAECHO_DATA") or Path.home() / ".cache" / "maecho" / "data")


def unchecked() -> bool:
    """Whether files with other content than the known one are welcome: MAECHO_DATA_UNCHECKED=1."""
    return os.environ.get("MAECHO_DATA_UNCHECKED") == "1"


def find(name: str, folder: Path | None, file: str, source: str, suffixes: tuple[str, ...] = ("",)) -> Path:
    """The file in `folder`/`name` or in `folder`, by default the data folder.

    Args:
        source: where one gets the file, for the message if it is missing.
        suffixes: what may follow the file's name, tried in this order.
    """
    folder = data_folder() if folder is None else folder
    for place in (folder / name, folder):
        for suffix in suffixes:
            path = place / f"{file}{suffix}"
            if path.exists():
                return path
    names = " or ".join(f"{file}{suffix}" for suffix in reversed(suffixes))
    raise MissingDataError(
        f"{name}: {folder} has no {names}, neither there nor in its folder {name}; get it from {source}, and "
        "set MAECHO_DATA to the folder that holds the data"
    )
