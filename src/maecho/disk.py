"""Files on disk: they are written whole or not at all, and only regular files are read.

A file is written under a temporary name in the same folder, flushed to the disk and renamed. So a crash or a kill at
any moment leaves the old file or the new one. The writer holds a lock on the temporary file. A temporary file without a
lock belongs to a writer that died. The next writer of the same file removes it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from maecho.errors import InputError

try:
    import fcntl
except ImportError:  # Windows has no fcntl: there, the temporary files of dead writers stay
    fcntl = None  # type: ignore[assignment]

_RANDOM = 4
"""Bytes of the random part of a temporary name."""
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def write_whole(
    path: Path,
    write: Callable[[BinaryIO], object],
    mode: int | None = None,
    error: type[InputError] = InputError,
) -> None:
    """Let `write` fill a temporary file beside `path`, then give it that name.

    Args:
        mode: permissions. None: what the user's umask leaves of 0666.
        error: raised if the file cannot be written. A link is refused: renaming would replace the link and leave the
            file that it points to unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_place(path, error)
        _remove_stale(path)
        part, descriptor = _new_part(path, mode)
    except OSError as reason:
        raise error(f"cannot write {path}: {reason.strerror}") from reason
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
            if fcntl is None:
                file.close()  # Windows renames no open file
            part.replace(path)  # while the lock is held, so that nobody removes the part as stale
        _sync_folder(path.parent)
    except OSError as reason:
        raise error(f"cannot write {path}: {reason.strerror or reason}") from reason
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    write_whole(path, lambda file: file.write(content.encode()))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for a lock on this file and hold it, so that one process at a time can read, change and write the file.

    The lock is a hidden file in the same folder.
    """
    from filelock import FileLock  # a dependency of torch too

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            yield
    except OSError as reason:
        raise InputError(f"cannot write {path}: {reason.strerror or reason}") from reason


@contextlib.contextmanager
def regular(path: Path, error: type[InputError] = InputError) -> Iterator[io.FileIO]:
    """Open a regular file for reading. A pipe that nobody writes to is refused without waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _BINARY | _NO_WAIT)
    except (OSError, ValueError) as reason:  # ValueError: a name with a zero byte
        raise error(f"{path} must be a file, got {_instead(path, reason)}") from reason
    found = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(found):
        os.close(descriptor)
        raise error(f"{path} must be a file, got {kind(found)}")
    with io.FileIO(descriptor, "rb") as file:
        yield file


def _instead(path: Path, reason: Exception) -> str:
    """What stands at a path that cannot be opened, for the end of an error message."""
    if isinstance(reason, FileNotFoundError):
        return "nothing at that place"
    with contextlib.suppress(OSError, ValueError):
        found = path.stat().st_mode
        if not stat.S_ISREG(found):
            return kind(found)
    return f"an error: {getattr(reason, 'strerror', None) or reason}"


def kind(mode: int) -> str:
    """What stands at a path, by the `st_mode` that the system gives for it."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _check_place(path: Path, error: type[InputError]) -> None:
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found):
        hint = "; name the file that it points to" if stat.S_ISLNK(found) else ""
        raise error(f"cannot write {path}: only a regular file can be replaced, got {kind(found)}{hint}")


def _stem(path: Path) -> str:
    """The beginning of the names of temporary files for this path. It is cut, since names have at most 255 bytes."""
    return f".{os.fsencode(path.name)[:200].decode(errors='ignore')}."


def _new_part(path: Path, mode: int | None) -> tuple[Path, int]:
    """Create a temporary file and lock it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY | _NO_LINK
    while True:
        part = path.parent / f"{_stem(path)}{secrets.token_hex(_RANDOM)}.part"
        descriptor = os.open(part, flags, 0o666 if mode is None else 0o600)
        # Between the two calls another writer may have removed the new file as stale. Then try again.
        if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return part, descriptor
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Remove the temporary files of writers that died."""
    pattern = re.compile(re.escape(_stem(path)) + rf"[0-9a-f]{{{2 * _RANDOM}}}\.part")
    for part in [one for one in path.parent.iterdir() if pattern.fullmatch(one.name)]:
        with contextlib.suppress(OSError):  # it belongs to another user, or is gone already
            descriptor = os.open(part, os.O_WRONLY | _NO_WAIT | _BINARY | _NO_LINK)
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor):
                    part.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Try to lock a file. True: this process holds the lock. False: another one does. None: this system has no locks,
    so nobody can tell whether a file is stale."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that a new name in it survives a power cut. Some file systems cannot do this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
