"""Names, error sentences and JSON from untrusted sources."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from maecho import InputError, UploadError, names, schema
from maecho.errors import LONGEST, one_line, printable
from support.tiny import refused, upload


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "x" * 201, "\u202e", "\ud800", " "])
def test_names_are_printable_and_short_at_birth(name: str) -> None:
    one = upload()
    with refused("a weight must have a name"):
        replace(one, weights={**one.weights, name: torch.ones(1)})
    with refused("a client must have a name"):
        replace(one, client=name)
    with refused("ann: a tied weight must have a name"):
        replace(one, aliases={name: "0.weight"})
    with refused("ann: a neuron space must have a name"):
        replace(one, spaces=(replace(one.spaces[0], name=name),))  # type: ignore[index]


def test_the_empty_name_is_allowed_only_where_it_is_asked_for() -> None:
    names.check("a layer", "", empty=True)
    with pytest.raises(InputError, match=r"^a client must have a name, got ''$"):
        names.check("a client", "")


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
def test_whole_numbers_have_64_bits(number: int) -> None:
    assert schema.parse(str(2**63 - 1).encode()) == 2**63 - 1
    assert schema.parse(str(-(2**63)).encode()) == -(2**63)
    with pytest.raises(ValueError, match="which is too large"):
        schema.parse(str(number).encode())


def test_a_recipe_is_json_at_birth() -> None:
    for recipe in ({"a": float("nan")}, {"a": object()}, {"a": "x" * 300_000}):
        with refused("ann: the recipe must"):
            replace(upload(), recipe=recipe)


def test_a_sentence_is_one_printable_line_of_at_most_500_characters() -> None:
    long = UploadError("ann: " + "x\n\x1b[31m\u202e" * 10**6 + ", got \ud800 7")
    assert len(str(long)) == LONGEST
    assert str(long).startswith(r"ann: x \x1b[31m\u202ex")
    assert str(long).endswith(r", got \ud800 7")
    assert " … " in str(long)
    assert str(long).isprintable()
    assert str(InputError(str(long))) == str(long) == one_line(str(long))
    assert isinstance(long, InputError)
    assert isinstance(long, ValueError)
    assert printable("é [/red] → 7") == "é [/red] → 7"


def test_json_is_read_strictly() -> None:
    assert schema.parse(b'{"a": [1, 2.5, "\\"[[", null, true]}') == {"a": [1, 2.5, '"[[', None, True]}
    for raw in (b"[" * 10**6, b'"' + b'\\"' * 10**6, b'["' + b"[" * 10**6, b'{"a":1,"a":1}', b"\xff", b""):
        began = time.perf_counter()
        with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
            schema.parse(raw)
        assert time.perf_counter() - began < 5
