"""Headers that are refused although their digests are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maecho import Upload, UploadError, aggregate, make_upload
from maecho.network.layers import Layer
from maecho.upload import storage
from maecho.upload.header import WHOLE, check_architecture
from support import damage, mutations
from support.tiny import ANN, batches, cases, network, refused, refused_input, saved, upload, with_statistics


def relisted(folder: Path, **entry: object) -> Path:
    """An upload whose header lists one tensor in another way, with a new digest."""
    header, data = damage.split(saved(folder).read_bytes())
    content = json.loads(header)
    content["weights/0.weight"] |= entry
    (folder / ANN).write_bytes(
        damage.joined(damage.resealed(json.dumps(content, separators=(",", ":")).encode()), data)
    )
    return folder / ANN


LISTED: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "float8": ({"dtype": "F8_E4M3"}, ("F8_E4M3",)),
    "complex": ({"dtype": "C64"}, ("C64",)),
    "negative axis": ({"shape": [-5, -4]}, ("shape",)),
    "many axes": ({"shape": [1] * 300}, ("shape",)),
    "product that wraps": ({"shape": [2**32, 2**32]}, ("shape",)),
    "nothing of a huge tensor": ({"shape": [0, 2**62]}, ("shape",)),
    "whole number that is real": ({"shape": [5.0, 4]}, ("int",)),
    "true": ({"shape": [True, 4]}, ("int",)),
    "larger": ({"shape": [2**40]}, ("'weights/0.weight'", "takes")),
    "gap": ({"data_offsets": [8, 88]}, ("takes",)),
    "overlap": ({"data_offsets": [0, 80]}, ("takes",)),
    "no offsets": ({"data_offsets": None}, ("data_offsets",)),
}


@pytest.mark.parametrize(("entry", "parts"), **cases(LISTED))
def test_a_header_that_lists_what_cannot_be(tmp_path: Path, entry: dict[str, object], parts: tuple[str, ...]) -> None:
    with refused(ANN, "whole safetensors file", *parts):
        Upload.load(relisted(tmp_path, **entry))


def test_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes() + b"more")
    with refused(ANN, "bytes of tensors, where its header lists"):
        Upload.load(path)


NINES, ZEROS = f"{'9' * 29} … {'9' * 28}", f"1{'0' * 28} … {'0' * 28}"
RAW: dict[str, tuple[str, str, str]] = {
    "deep": ("[" * 100 + "]" * 100, "lists nested more than 32 deep", ""),
    "deep and open": ("[" * 5000, "lists nested more than 32 deep", ""),
    "deep dictionaries": ('{"a":' * 100 + "1" + "}" * 100, "lists nested more than 32 deep", ""),
    "NaN": ("NaN", "NaN, which is not JSON", ""),
    "minus infinity": ("-Infinity", "-Infinity, which is not JSON", ""),
    "infinite": ("1e999", "the number 1e999, which is too large", ""),
    "10**30": (str(10**30), f"the number {10**30}, which is too large", ""),
    "a number of 5000 digits": ("9" * 5000, f"the number {NINES}, which is too large", ""),
    "a round number of 4000 digits": ("1" + "0" * 4000, f"the number {ZEROS}, which is too large", ""),
    "no JSON": ("{", "Expecting property name enclosed in double quotes", "Expecting ',' delimiter"),
    "a word": ("tru", "Expecting value", ""),
    "an escape that is none": (r'"\x"', "Invalid \\escape", ""),
    "an open string": ('"open', "Expecting ',' delimiter", "Unterminated string"),
    "nothing": ("", "Expecting value", ""),
    "a key twice": ('1,"client":"bob"', "the key 'client' twice", "Expected `object`, got `int`"),
    "a key twice within": ('{"client":1,"client":2}', "the key 'client' twice", ""),
}
"""Text in place of a value -> the reason why the JSON text is not read, and why a header is not; "": the same."""


@pytest.mark.parametrize(("value", "in_text", "in_header"), **cases(RAW))
def test_json_that_is_not_read(tmp_path: Path, value: str, in_text: str, in_header: str) -> None:
    path = saved(tmp_path)
    text = json.dumps({**storage.read_about(path, "upload"), "client": "PLACE"}).replace('"PLACE"', value)
    damage.forged_text(path, load_file(path), text)
    with refused(f"{path} must be a maecho upload, got a safetensors file that is damaged or", f"({in_text}"):
        Upload.load(path)
    header = json.dumps({"__metadata__": {}, "a": "PLACE"}).replace('"PLACE"', value).encode()
    path.write_bytes(damage.joined(header, b""))
    with refused(
        f"{path} must be a whole safetensors file, got one that is cut short or foreign ({in_header or in_text}"
    ):
        Upload.load(path)


def test_every_text_of_the_fuzz_run_that_is_not_json_has_its_reason() -> None:
    """Some are sound JSON: what they stand for is checked by its type."""
    sound = {"[" * 20 + "]" * 20, '"\\ud800"', '"\\u0000"'}
    deep = {"[" * 200 + "]" * 200}  # as deep as above
    assert set(mutations.RAW) - sound - deep <= {value for value, _, _ in RAW.values()}


def said_shape(about: dict[str, Any], shape: list[int]) -> dict[str, Any]:
    return {"statistics": {**about["statistics"], "moments": {"": {"shape": shape}}}}


TURNED = {"transposed": True, "convolution": True}
SAID: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]] = {
    "examples are true": (lambda a: {"examples": True}, ("bool",)),
    "examples are real": (lambda a: {"examples": 30.0}, ("float",)),
    "no examples": (lambda a: {"examples": 0}, ("at least 1", "got 0")),
    "examples beyond 2**53": (lambda a: {"examples": 2**53 + 1}, ("at most 2**53", "got 9007199254740993")),
    "a client of control characters": (lambda a: {"client": "\x1b[31mann"}, ("printable", r"\x1b[31mann")),
    "a client in the other direction": (lambda a: {"client": "\u202eann"}, ("printable", r"\u202eann")),
    "a client of 100 kB": (lambda a: {"client": "x" * 100_000}, ("at most 100 printable", "100000 characters")),
    "no client": (lambda a: {"client": " "}, ("a client must have a name", "' '")),
    "no groups": (lambda a: {"layers": [{**a["layers"][0], "groups": 0}, a["layers"][1]]}, ("groups", "got 0")),
    "groups that do not divide": (
        lambda a: {"layers": [{**a["layers"][0], "groups": 3}, a["layers"][1]]}, ("divide its 5 outputs", "got 3"),
    ),
    "a layer twice": (lambda a: {"layers": [*a["layers"], a["layers"][0]]}, ("'0' twice",)),
    "a weight in two layers": (
        lambda a: {"layers": [*a["layers"], {**a["layers"][0], "name": "other"}]}, ("'0.weight' twice",),
    ),
    "a layer without its weight": (
        lambda a: {"layers": [{**a["layers"][0], "weight": "w"}, a["layers"][1]]}, ("'w', got none",),
    ),
    "a bias as weight": (
        lambda a: {"layers": [{**a["layers"][0], "weight": "0.bias"}, a["layers"][1]]}, ("at least 2 axes", "(5,)"),
    ),
    "a bias of another length": (
        lambda a: {"layers": [{**a["layers"][0], "bias": "2.bias"}, a["layers"][1]]},
        ("'2.bias' must have one entry for each of the 5 outputs", "(3,)"),
    ),
    "transposed in groups": (
        lambda a: {"layers": [{**a["layers"][0], "groups": 2, "transposed": True}, a["layers"][1]]},
        ("1 group", "got 2 and 2"),
    ),
    "transposed, of a convolution, in groups": (
        lambda a: {"layers": [{**a["layers"][0], **TURNED, "groups": 2}, a["layers"][1]]},
        ("groups that divide its 5 inputs", "got 2"),
    ),
    "transposed, of a convolution, with another bias": (
        lambda a: {"layers": [{**a["layers"][0], **TURNED, "groups": 5}, a["layers"][1]]},
        ("'0.bias' must have one entry for each of the 20 outputs", "(5,)"),
    ),
    "layers of text": (lambda a: {"layers": ["0", "2"]}, ("layers",)),
    "a layer of a long name": (
        lambda a: {"layers": [{**a["layers"][0], "name": "x" * 300}, a["layers"][1]]}, ("200 printable", "300"),
    ),
    "a head that is not there": (lambda a: {"head": "3"}, ("one of its layers", "'3'")),
    "a tie to nothing": (lambda a: {"aliases": {"head": "w"}}, ("tied to a weight", "'w'")),
    "a tied weight that is one": (lambda a: {"aliases": {"0.bias": "2.bias"}}, ("'0.bias'", "got both")),
    "a space of another size": (
        lambda a: {"spaces": [{**a["spaces"][0], "size": 4}]}, ("must be 4 neurons of 1 entries, got 5",),
    ),
    "a space of negative blocks": (
        lambda a: {"spaces": [{"name": "0", "size": -5, "places": [{"tensor": "0.bias", "axis": 0, "block": -1}]}]},
        ("positive", "got -5"),
    ),
    "a space of no weight": (
        lambda a: {"spaces": [{"name": "0", "size": 5, "places": [{"tensor": "w", "axis": 0}]}]}, ("'w'",),
    ),
    "an axis that is not there": (
        lambda a: {"spaces": [{"name": "0", "size": 5, "places": [{"tensor": "0.bias", "axis": 7}]}]},
        ("no such axis",),
    ),
    "a space in two": (lambda a: {"spaces": [a["spaces"][0], {**a["spaces"][0], "name": "b"}]}, ("belong to one",)),
    "an unknown statistic": (lambda a: {"statistics": {**a["statistics"], "hessian": {}}}, ("'hessian'",)),
    "a list of statistics": (lambda a: {"statistics": ["gram", *a["statistics"]]}, ("statistics",)),
    "a statistic that is not listed": (
        lambda a: {"statistics": {"classes": {}}}, ("of a listed statistic", "'features'"),
    ),
    "inputs of a shape that wraps": (lambda a: said_shape(a, [2**32, 2**32]), ("shape of positive numbers",)),
    "inputs of a negative shape": (lambda a: said_shape(a, [-2, -2]), ("shape of positive numbers",)),
    "a recipe that is long": (lambda a: {"recipe": {"a": "x" * 300_000}}, ("recipe", "262144")),
    "a recipe of text": (lambda a: {"recipe": "mine"}, ("recipe",)),
    "a maker of control characters": (lambda a: {"made_by": "\x07"}, ("made_by", r"\x07")),
}  # fmt: skip


@pytest.mark.parametrize(("change", "parts"), **cases(SAID))
def test_a_header_that_says_what_cannot_be(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], parts: tuple[str, ...]
) -> None:
    path = saved(tmp_path)
    about = storage.read_about(path, "upload")
    damage.forged(path, load_file(path), {**about, **change(about)})
    with refused(str(path), *parts):
        Upload.load(path)
    with pytest.raises(UploadError):
        aggregate([upload("bob"), path])


UNSEEN: dict[str, tuple[dict[str, Any], str]] = {
    "beside a statistic": (
        {"classes/more": "targets"}, "classes must hold tensors that maecho reads, got 'more' besides",
    ),
    "a statistic in another": (
        {f"moments/more/{part}": f"moments/{part}" for part in ("classes", "counts", "means")},
        "moments must hold tensors that maecho reads, got 'more/classes' besides",
    ),
    "of another end": ({"gram/0/more": "targets"}, "gram must hold tensors that maecho reads, got '0/more' besides"),
    "two residuals": (
        {f"features/2/{part}": "features/2/means" for part in ("residual", "residual_of_cosines")},
        "features of '2' must have one of residual and residual_of_cosines, got both",
    ),
    "a weight without a name": ({"weights": "targets"}, "must be named weights/<name>, got 'weights'"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "sentence"), **cases(UNSEEN))
def test_no_tensor_travels_unseen(tmp_path: Path, more: dict[str, str], sentence: str) -> None:
    """`inspect` shows what was read. So a file must not hold tensors that nobody reads."""
    path = saved(tmp_path)
    about, tensors = storage.read_about(path, "upload"), load_file(path)
    damage.forged(path, tensors | {key: tensors[like] for key, like in more.items()}, about)
    with refused(str(path), sentence):
        Upload.load(path)


def test_shapes_of_an_entry_that_is_not_there(tmp_path: Path) -> None:
    path = saved(tmp_path)
    about = storage.read_about(path, "upload")
    facts = {**about["statistics"], "features": {"0": {"shape": [4]}, **about["statistics"]["features"]}}
    damage.forged(path, load_file(path), {**about, "statistics": facts})
    with refused(str(path), "features must have the entry '0' as the header says, got none"):
        Upload.load(path)


@pytest.mark.parametrize("key", ["classes", "moments/counts", "features/2/covariances/ranks"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_many_whole_numbers_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, dtype: torch.dtype
) -> None:
    """Python reads them one by one. A sparse file of 4 GB of small numbers would take 40 GB."""
    path = saved(tmp_path)
    about, tensors = storage.read_about(path, "upload"), load_file(path)
    damage.forged(path, {**tensors, key: torch.zeros(WHOLE, dtype=dtype)}, about)
    monkeypatch.setattr(storage.File, "read", lambda file, name: pytest.fail("it was read"))
    with refused(str(path), f"statistics must hold at most {WHOLE} whole numbers, got {WHOLE + 18}"):
        Upload.load(path)


def test_the_time_for_layers_does_not_grow_with_their_square() -> None:
    """A header of 8 MB lists 26,000 layers. Each is looked up among the weights; nothing walks over all weights for
    each of them."""
    walks = 0

    class Counted(dict[str, torch.Tensor]):
        def items(self) -> Any:
            nonlocal walks
            walks += 1
            return super().items()

    weights = Counted({str(i): torch.zeros(1, 1) for i in range(50)})
    check_architecture("ann", weights, [Layer(name, name) for name in weights], None, {})
    assert walks <= 2


HUGE = 2**62
COUNTS: dict[str, tuple[dict[str, list[int]], str]] = {
    "class counts that wrap": ({"classes": [2**62, 2**62, 2**63 - 1]}, "class counts must sum to its 30 examples"),
    "moments that wrap": ({"moments/counts": [HUGE, HUGE, HUGE]}, "counts of the class moments"),
    "classes beyond the head": ({"moments/classes": [0, 1, HUGE]}, "must lie in 0 … 2"),
    "negative classes": ({"moments/classes": [0, 1, -2]}, "or be -1 for no class"),
}


@pytest.mark.parametrize(("change", "part"), **cases(COUNTS))
def test_whole_numbers_are_in_their_range(tmp_path: Path, change: dict[str, list[int]], part: str) -> None:
    path = saved(tmp_path)
    about = storage.read_about(path, "upload")
    changed = {name: torch.tensor(values) for name, values in change.items()}
    damage.forged(path, {**load_file(path), **changed}, about)
    with refused("ann", part):
        Upload.load(path)


def test_four_counts_whose_sum_wraps_to_the_right_one() -> None:
    made = make_upload(network(classes=4), batches(classes=4), "ann", ["classes"])
    with refused("class counts must sum to its 30 examples", "got 18446744073709551646"):
        with_statistics(made, classes=torch.tensor([2**62, 2**62, 2**62, 2**62 + 30]))


@pytest.mark.parametrize("key", ["gram/0/values", "moments/means", "targets", "fisher/0.bias", "features/2/means"])
def test_statistics_are_of_floating_point(tmp_path: Path, key: str) -> None:
    path = saved(tmp_path)
    about, tensors = storage.read_about(path, "upload"), load_file(path)
    damage.forged(path, {**tensors, key: torch.ones_like(tensors[key], dtype=torch.bool)}, about)
    with refused("ann", "floating point, got torch.bool"):
        Upload.load(path)


def test_a_bool_is_a_zero_or_a_one(tmp_path: Path) -> None:
    storage.write_tensors(tmp_path / "file", "model", {"w": torch.tensor([2, 1], dtype=torch.uint8)}, {})
    header, data = damage.split((tmp_path / "file").read_bytes())
    (tmp_path / "file").write_bytes(damage.joined(damage.resealed(header.replace(b'"U8"', b'"BOOL"')), data))
    with refused_input("'w'", "zeros and ones"):
        storage.read_tensors(tmp_path / "file")
