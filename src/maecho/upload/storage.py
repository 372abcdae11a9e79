"""Writes and reads the files of uploads, merged models and relays. They are safetensors files and never pickled.

The key `maecho` of the metadata holds one JSON text: the kind of file, the format version, the SHA-256 of every tensor,
and all that the writer says about the file. The key `sha256` holds the digest of the header itself. So every byte that
is read is checked against what was written, which finds damage. It does not prove who wrote the file, since anybody can
compute a digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maecho import disk, names, schema
from maecho.errors import InputError, UploadError
from maecho.upload import envelope
from maecho.upload.envelope import Entry, Limits

KEY = "maecho"
DIGEST = "sha256"
VERSION = 2
"""The version of the file format. From the first release on, it goes up if an older maecho cannot read new files."""
PRIVATE = 0o600
_OURS = ("kind", "version", "tensors")
"""The entries of the JSON text that this module writes. The others come from its callers."""
_LONGEST_KEY = names.PART + 50
"""The most characters of a tensor's key, which is the name of a weight or layer and the part that it belongs to."""
_BLOCK = 512
"""The bytes of a block, as `stat` counts them on every system."""
_SPARSE = 2**26
"""Files of at least so many bytes are refused if they are sparse. Smaller ones do no harm."""
_STORED = 1 / 8
"""A file is sparse if less than this share of it is stored. File systems that compress store less than all, too."""
_AT_ONCE = 2**26
"""How many bytes one call reads."""


@dataclass(frozen=True)
class _Identity:
    """The entries that the JSON text of every file must have."""

    kind: str
    version: int

    def __post_init__(self) -> None:
        if self.version < 1:
            raise ValueError(f"version {self.version}")


class File:
    """An open file whose header has been read and checked. A tensor is read when it is asked for, into new memory."""

    def __init__(self, path: Path, raw: io.FileIO, limits: Limits, wanted: str, error: type[InputError]):
        self.path, self.error = path, error
        self._raw = raw
        self.size = size = os.fstat(raw.fileno()).st_size
        if size > limits.file:
            raise self.error(
                f"{path} must be of at most {limits.file} bytes, got {size}; the environment variable MAECHO_MAX_FILE "
                "allows larger files"
            )
        self._check_holes(size)
        length = int.from_bytes(self._bytes(0, envelope.LENGTH, size), "little")
        if envelope.LENGTH + length > size:
            raise self._foreign(f"a header of {length} bytes in a file of {size}")
        if length > limits.header:
            raise self.error(
                f"{path} must have a header of at most {limits.header} bytes, got {length}; the environment variable "
                "MAECHO_MAX_HEADER allows larger headers"
            )
        header = self._bytes(envelope.LENGTH, length, size)
        self._data = envelope.LENGTH + length
        self.digest = envelope.digest_of_header(header)
        """The digest of the header. Two readings of a file of format 2 with one digest give the same tensors, since the
        header lists the digest of every tensor. Format 1 lists only their dtypes and shapes."""
        try:
            self.listing, metadata = envelope.parse(header, size - self._data)
        except ValueError as error:
            raise self._foreign(str(error)) from error
        self.version: int | None = None
        self.about: dict[str, Any] = {}
        """All that the writer says about the file. Empty if maecho did not write it."""
        self._digests: dict[str, str] | None = None
        if KEY in metadata or DIGEST in metadata:
            self._identify(header, metadata, wanted)

    def read_again(self, raw: io.FileIO) -> None:
        """Go on with the same file, which was closed and opened again. Refuse it if its header is another one."""
        self._raw = raw
        size = os.fstat(raw.fileno()).st_size
        header = self._bytes(envelope.LENGTH, self._data - envelope.LENGTH, size) if size == self.size else b""
        if envelope.digest_of_header(header) != self.digest:
            raise self.error(
                f"{self.path} must stay as it is while it is used, got another file than at the first reading"
            )
        self._check_holes(size)

    def _check_holes(self, size: int) -> None:
        """Refuse a large sparse file. Whoever made it stored almost nothing, and its reader would need all the memory.

        Some network file systems tell 0 blocks of every file. These files are not judged.
        """
        stored = getattr(os.fstat(self._raw.fileno()), "st_blocks", 0) * _BLOCK
        if size >= _SPARSE and 0 < stored < size * _STORED:
            raise self.error(
                f"{self.path} must be stored as a whole, got a sparse file: {stored} of its {size} bytes are stored"
            )

    @property
    def kind(self) -> str | None:
        """ "upload", "model" or "relay". None if maecho did not write the file."""
        return self.about["kind"] if self.about else None

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises an error if its bytes are not those that were written."""
        entry: Entry = self.listing[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        flat = envelope.as_bytes(tensor)
        self._fill(flat, self._data + entry.begin)
        if self._digests is not None and hashlib.sha256(flat).hexdigest() != self._digests[name]:
            raise self.error(f"{self.path} must be as it was written, got other bytes in the tensor {name!r}")
        if entry.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise self.error(f"{self.path}: tensor {name!r} must be of zeros and ones, got other bytes")
        return tensor

    def read_all(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Read all tensors whose names are wanted: name -> tensor."""
        return {name: self.read(name) for name in sorted(self.listing) if wanted(name)}

    def _identify(self, header: bytes, metadata: Mapping[str, str], wanted: str) -> None:
        """Read the entries that maecho wrote into the metadata, and compare the header with its digest."""
        try:
            about = schema.parse(metadata.get(KEY, "").encode())
            version = schema.convert(about, _Identity).version
        except ValueError as error:
            raise self.error(
                f"{self.path} must be a {wanted}, got a safetensors file that is damaged or that maecho did not write "
                f"({error})"
            ) from error
        if version > VERSION:
            raise self.error(
                f"{self.path} must be of file format {VERSION} or older, got {version}: it needs a newer maecho"
            )
        if version == 1 and DIGEST in metadata:
            raise self.error(f"{self.path} must have no digest, since it is of file format 1, got one with a digest")
        if version > 1:
            self._check_digest(header, metadata)
            self._digests = self._listed_digests(about.pop("tensors", None))
        self.version, self.about = version, about

    def _check_digest(self, header: bytes, metadata: Mapping[str, str]) -> None:
        stated = metadata.get(DIGEST, "")
        blanked = envelope.blank(header, stated)
        if blanked is None or envelope.digest_of_header(blanked) != stated:
            got = "another header" if DIGEST in metadata else "a header without its digest"
            raise self.error(f"{self.path} must be as it was written, got {got}")

    def _listed_digests(self, content: object) -> dict[str, str]:
        try:
            digests = schema.convert(content, dict[str, str])
        except ValueError as error:
            raise self.error(f"{self.path} must list digests of its tensors, got others ({error})") from error
        for name in sorted(digests.keys() ^ self.listing.keys()):
            expected, got = ("there", "none") if name in digests else ("absent", "one")
            raise self.error(f"{self.path}: tensor {name!r} must be {expected} as the header says, got {got}")
        for name in digests:
            names.check(f"{self.path}: a tensor", name, _LONGEST_KEY, error=self.error)
        return digests

    def _bytes(self, start: int, count: int, size: int) -> bytes:
        if start + count > size:
            raise self._foreign(f"{size} bytes")
        buffer = bytearray(count)
        self._fill(memoryview(buffer), start)
        return bytes(buffer)

    def _fill(self, view: memoryview, start: int) -> None:
        done = 0
        try:
            self._raw.seek(start)
            while done < len(view):
                came = self._raw.readinto(view[done : done + _AT_ONCE])
                if not came:
                    raise self.error(f"{self.path} must stay as it is while it is read, got one that was cut short")
                done += came
        except OSError as error:
            raise self.error(f"cannot read {self.path}: {error.strerror}") from error

    def _foreign(self, reason: str) -> InputError:
        return self.error(
            f"{self.path} must be a whole safetensors file, got one that is cut short or foreign ({reason})"
        )


@contextlib.contextmanager
def opened(path: Path, kind: str | None = None, limits: Limits | None = None) -> Iterator[File]:
    """Open a file of this kind, or any safetensors file if the kind is None. Only the header is read here.

    A file that cannot be used raises UploadError if an upload is wanted, and InputError if not.
    """
    error = _error_of(kind)
    with disk.regular(path, error) as raw, _enough_memory(path, error):
        file = File(path, raw, limits or Limits.of_environment(), f"maecho {kind or 'file'}", error)
        if kind is not None and file.kind is None:
            raise error(f"{path} must be a maecho {kind}, got a safetensors file that maecho did not write")
        if kind is not None and file.kind != kind:
            raise error(f"{path} must be a maecho {kind}, got a maecho {file.kind}")
        yield file


@contextlib.contextmanager
def reopened(file: File) -> Iterator[File]:
    """Open a file once more whose header is known. It is not read again, only compared."""
    with disk.regular(file.path, file.error) as raw, _enough_memory(file.path, file.error):
        file.read_again(raw)
        yield file


def _error_of(kind: str | None) -> type[InputError]:
    return UploadError if kind == "upload" else InputError


@contextlib.contextmanager
def _enough_memory(path: Path, error: type[InputError]) -> Iterator[None]:
    """Turn the two errors that mean "no memory is left" into one sentence. torch raises a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as reason:
        if isinstance(reason, RuntimeError) and "you tried to allocate" not in str(reason):
            raise
        raise error(f"{path} must fit into memory, got one that is too large for this machine") from reason


def write_tensors(
    path: Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], mode: int | None = None
) -> None:
    """Write a file.

    Args:
        kind: "upload", "model" or "relay".
        tensors: by their keys in the file.
        about: all that the file says about itself, as JSON values.
        mode: who may read it, as for `chmod`. None: as the user's umask says.
    """
    wrong = _error_of(kind)
    for name, tensor in tensors.items():
        names.check(f"cannot write {path}: a tensor", name, _LONGEST_KEY, error=wrong)
        if tensor.dtype not in envelope.NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in envelope.NAMES)
            raise wrong(f"cannot write {path}: {name!r} must be of {known}, got {tensor.dtype}")
    digests = {name: hashlib.sha256(envelope.as_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}
    own = dict(zip(_OURS, (kind, VERSION, digests), strict=True))
    try:
        text = json.dumps({**about, **own}, allow_nan=False)
        schema.parse(text.encode())
    except (TypeError, ValueError) as error:
        raise wrong(f"cannot write {path}: the entries of its header must be JSON, got {error}") from error
    header = envelope.header_of(tensors, {KEY: text}, DIGEST)
    disk.write_whole(path, lambda file: envelope.write(file, header, tensors), mode, wrong)


def read_about(path: Path, kind: str) -> dict[str, Any]:
    """All that a file of this kind says about itself. Its tensors are not read."""
    with opened(path, kind) as file:
        return file.about


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Read the tensors whose names are wanted, from any safetensors file."""
    with opened(path) as file:
        return file.read_all(wanted)
