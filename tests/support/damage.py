"""Makes files that maecho itself would never write."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from maecho.upload import envelope, storage


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(envelope.as_bytes(tensor)).hexdigest()


def forged(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """A file of these tensors that says this of itself, as whoever can compute digests may make one. Without "tensors"
    in `about` these are listed rightly."""
    listed = {"tensors": {name: digest(tensor) for name, tensor in tensors.items()}}
    return forged_text(path, tensors, json.dumps({**listed, **about}))


def forged_text(path: Path, tensors: Mapping[str, Tensor], text: str) -> Path:
    content = io.BytesIO()
    envelope.write(content, envelope.header_of(tensors, {storage.KEY: text}, storage.DIGEST), tensors)
    path.write_bytes(content.getvalue())  # at the end: what safetensors' own reader gave lies in the file still
    return path


def resealed(header: bytes) -> bytes:
    """A changed header with a new digest. If it has no digest, it stays as it is."""
    place = header.find(b'"sha256":"')
    if place < 0:
        return header
    start = place + len(b'"sha256":"')
    blanked = header[:start] + b"0" * 64 + header[start + 64 :]
    return blanked[:start] + envelope.digest_of_header(blanked).encode() + blanked[start + 64 :]


def split(content: bytes) -> tuple[bytes, bytes]:
    """Split a file into its header and its data."""
    end = envelope.LENGTH + int.from_bytes(content[: envelope.LENGTH], "little")
    return content[envelope.LENGTH : end], content[end:]


def joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(envelope.LENGTH, "little") + header + data
