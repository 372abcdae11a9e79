"""The safetensors format: eight bytes of length, a JSON header, the numbers of one tensor after the other.

Files are read here instead of by the library, for two reasons. The header of an untrusted file must be checked before
memory is reserved for its tensors. And the library maps a file into memory, although its sender may still change it.
Any safetensors tool can read the files that are written here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from maecho import schema
from maecho.errors import InputError
from maecho.formatting import bytes_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that a tensor may have: name in the file -> dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
LENGTH = 8
"""How many bytes hold the length of the header."""
_AXES = 8
_ELEMENTS = 2**53
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Limits:
    """The largest file and header that are read. MAECHO_MAX_FILE and MAECHO_MAX_HEADER change the defaults."""

    file: int = 4 * 2**30
    """In bytes. Reading a file takes as much memory as the file has, and up to as much again for covariances."""
    header: int = 8 * 2**20
    """In bytes. A layer with all its statistics takes about 3 kB. Parsing a hostile header takes up to 25 times its
    size in memory."""

    def __post_init__(self) -> None:
        for name in ("file", "header"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"the limit of the {name} must be a number of bytes, at least 1, got {value!r}")

    @classmethod
    def of_environment(cls) -> Limits:
        """The limits that the environment variables set, and the defaults for the others."""
        given = {name: os.environ.get(f"MAECHO_MAX_{name.upper()}") for name in ("file", "header")}
        return cls(**{name: _bytes(f"MAECHO_MAX_{name.upper()}", text) for name, text in given.items() if text})


def _bytes(name: str, text: str) -> int:
    """A size as people write it: 300000, 64 MB, 16 GB."""
    found = bytes_of(text)
    if found is None:
        raise InputError(f"{name} must be a number of bytes, or one of kB, MB, GB or TB, got {text!r}")
    return int(found)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies after the header, and how its bytes are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _Listed:
    """A tensor as the header lists it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"a tensor of the type {self.dtype!r}, which is not one of {', '.join(DTYPES)}")
        # An axis of length 0 makes the product 0, however long the others are. So it counts as 1 here.
        if len(self.shape) > _AXES or min(self.shape, default=0) < 0 or _product(self.shape) > _ELEMENTS:
            raise ValueError(f"a tensor of the shape {list(self.shape)[: _AXES + 1]}")

    @property
    def entry(self) -> Entry:
        return Entry(DTYPES[self.dtype], self.shape, *self.data_offsets)


def _product(shape: tuple[int, ...]) -> int:
    return math.prod(max(length, 1) for length in shape)


def parse(header: bytes, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors and the metadata that a header lists. `size` is the number of bytes after the header.

    Raises ValueError, with the reason, if the header is not of the format, if offsets leave gaps or overlap, or if they
    do not add up to `size`.
    """
    content = schema.parse(header)
    metadata: dict[str, str] = {}
    if isinstance(content, dict) and METADATA in content:
        metadata = schema.convert(content.pop(METADATA), dict[str, str])
    found = {name: one.entry for name, one in schema.convert(content, dict[str, _Listed]).items()}
    end = 0
    for name, one in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        bytes_ = math.prod(one.shape) * one.dtype.itemsize
        if one.begin != end or one.end - one.begin != bytes_:
            raise ValueError(f"the bytes {one.begin} to {one.end} for {name!r}, which takes {bytes_} from {end} on")
        end = one.end
    if end != size:
        raise ValueError(f"{size} bytes of tensors, where its header lists {end}")
    return found, metadata


def blank(header: bytes, digest: str) -> bytes | None:
    """The header as it was when its digest was computed: with zeros in place of the digest. None if the digest does not
    stand in it exactly once."""
    quoted = f'"{digest}"'.encode()
    if not _DIGEST.fullmatch(digest) or header.count(quoted) != 1:
        return None
    return header.replace(quoted, b'"' + b"0" * len(digest) + b'"')


def digest_of_header(blanked: bytes) -> str:
    """The digest of the header and its length. The padding at its end counts as part of it."""
    return hashlib.sha256(len(blanked).to_bytes(LENGTH, "little") + blanked).hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as a file holds them. Nothing is copied if it is on the CPU and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of the file: wide numbers first, so that every number lies at a multiple of its size."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], digest_key: str) -> bytes:
    """The header for these tensors. Its metadata hold its own digest under `digest_key`."""
    zeros = "0" * 64
    content: dict[str, object] = {METADATA: {**metadata, digest_key: zeros}}
    end = 0
    for name in in_order(tensors):
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        content[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    blanked = json.dumps(content, separators=(",", ":")).encode()
    blanked += b" " * (-len(blanked) % LENGTH)
    quoted = f'"{digest_key}":"{zeros}"'.encode()
    assert blanked.count(quoted) == 1
    return blanked.replace(quoted, f'"{digest_key}":"{digest_of_header(blanked)}"'.encode())


def write(file: BinaryIO, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write the header, then one tensor after the other, so that memory never holds a second copy of all of them."""
    file.write(len(header).to_bytes(LENGTH, "little"))
    file.write(header)
    for name in in_order(tensors):
        file.write(as_bytes(tensors[name]))
