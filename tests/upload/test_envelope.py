"""The envelope of a file: every byte behind the header belongs to one tensor."""

from __future__ import annotations

import json

import pytest
import torch

from maecho.upload import envelope


def header(*offsets: tuple[int, int]) -> bytes:
    """Of tensors a, b, … of two int16 numbers each, at these places."""
    entries = zip("abc", offsets, strict=False)
    return json.dumps({n: {"dtype": "I16", "shape": [2], "data_offsets": list(place)} for n, place in entries}).encode()


def test_tensors_lie_one_after_the_other() -> None:
    for places in (((0, 4), (4, 8)), ((4, 8), (0, 4))):
        found, metadata = envelope.parse(header(*places), 8)
        assert [(one.begin, one.end) for one in found.values()] == list(places)
        assert all(one.dtype == torch.int16 and one.shape == (2,) for one in found.values())
        assert metadata == {}


@pytest.mark.parametrize(
    ("places", "size", "words"),
    [
        (((0, 4), (6, 10)), 10, "the bytes 6 to 10 for 'b', which takes 4 from 4 on"),
        (((2, 6), (6, 10)), 10, "the bytes 2 to 6 for 'a', which takes 4 from 0 on"),
        (((0, 4), (2, 6)), 6, "the bytes 2 to 6 for 'b', which takes 4 from 4 on"),
        (((0, 4), (0, 4)), 4, "the bytes 0 to 4 for 'b', which takes 4 from 4 on"),
        (((0, 4), (4, 9)), 9, "the bytes 4 to 9 for 'b', which takes 4 from 4 on"),
        (((0, 4), (4, 8)), 9, "9 bytes of tensors, where its header lists 8"),
        (((0, 4), (4, 8)), 7, "7 bytes of tensors, where its header lists 8"),
    ],
)
def test_no_byte_is_unread_or_read_twice(places: tuple[tuple[int, int], ...], size: int, words: str) -> None:
    """Bytes in a gap would be covered by no digest."""
    with pytest.raises(ValueError, match=words):
        envelope.parse(header(*places), size)


def test_a_digest_stands_in_its_place_alone() -> None:
    tensors = {"a": torch.arange(3)}
    made = envelope.header_of(tensors, {"said": "x"}, "sha256")
    digest = json.loads(made)["__metadata__"]["sha256"]
    blanked = envelope.blank(made, digest)
    assert blanked is not None
    assert len(blanked) == len(made)
    assert envelope.digest_of_header(blanked) == digest
    again = made.replace(b'"x"', f'"{digest}"'.encode())
    assert envelope.blank(again, digest) is None, "twice: it would not be known which is the digest"
    assert envelope.blank(made, "0" * 63) is None
