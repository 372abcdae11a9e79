"""Converts the header of an upload of file format 1 to today's form. Files of format 1 have no digests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maecho import schema
from maecho.errors import UploadError
from maecho.upload.envelope import Entry
from maecho.upload.storage import File


def as_today(file: File) -> dict[str, Any]:
    """All that the file says, in today's form. Its list of tensors is compared with the tensors that it has.

    Raises ValueError if the header is not of format 1. The message completes "whose header says: …".
    """
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
    weights = {name.removeprefix("weights/"): entry for name, entry in file.listing.items()}
    about["layers"] = [_layer(layer, weights) for layer in _dictionaries(about.get("layers"))]
    shape = about.pop("input_shape", None)
    facts = {"moments": {"": {"shape": shape}}} if shape is not None else {}
    about["statistics"] = {name: facts.get(name, {}) for name in _texts(about.get("statistics"))}
    about["fingerprint"] = None  # format 1 computed it from fewer facts about a layer
    return about


def _layer(layer: dict[str, Any], weights: Mapping[str, Entry]) -> dict[str, Any]:
    """Add the kind of a layer, which format 1 does not say: a layer stored with its inputs first was an embedding, one
    with more than two axes a convolution."""
    entry = weights.get(str(layer.get("weight")))
    convolution = entry is not None and len(entry.shape) > 2
    return {**layer, "one_hot": layer.get("transposed", False), "convolution": convolution}


def _dictionaries(content: object) -> list[dict[str, Any]]:
    return schema.convert(content, list[dict[str, Any]])


def _texts(content: object) -> list[str]:
    return schema.convert(content, list[str])
