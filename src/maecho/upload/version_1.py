"""Uploads of file format 1, written before files carried digests: their headers in today's form."""

from __future__ import annotations

from typing import Any

from maecho import schema
from maecho.errors import UploadError
from maecho.upload.storage import File


def as_today(file: File) -> dict[str, Any]:
    """What the file says, once the list of tensors in it is held against those that are there."""
    about = dict(file.about)
    try:
        listed = schema.convert(about.pop("tensors", None), dict[str, list[str | int]])
    except ValueError as error:
        raise UploadError(
            f"{file.path} must be a maecho upload, got one whose tensors are not listed: {error}"
        ) from error
    there = {name: [str(entry.dtype).removeprefix("torch."), *entry.shape] for name, entry in file.listing.items()}
    for name in sorted(listed.keys() | there.keys()):
        expected, got = listed.get(name, "none"), there.get(name, "none")
        if got != expected:
            raise UploadError(f"{file.path}: tensor {name!r} must be {expected} as the header says, got {got}")
    return about
