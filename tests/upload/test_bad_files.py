"""Files: a file that is not an upload is refused in one sentence, and a file on disk is whole or absent."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from maecho import InputError, Merged, Upload, UploadError, aggregate, disk, make_upload
from maecho.upload import envelope
from maecho.upload import storage as files
from support.damage import digest, forged
from support.tiny import INF, NAN, batches, cases, network, refused, refused_input, upload, with_last_entry

ANN = "ann.safetensors"


def edited(
    path: Path, change: Callable[[dict[str, Tensor]], object] = bool, listed: bool = True, **header: Any
) -> Path:
    """An upload's file, its tensors and header changed by hand, with digests of what is there then; None takes an entry
    out of the header. `listed`: the header still lists the tensors that were there."""
    upload().save(path)
    about = files.read_about(path, "upload") | header
    about = {key: value for key, value in about.items() if not (key in header and value is None)}
    before = load_file(path)
    tensors = dict(before)
    change(tensors)
    if listed:
        about["tensors"] = {name: digest(tensors.get(name, tensor)) for name, tensor in before.items()}
    return forged(path, tensors, about)


@pytest.mark.parametrize("cut", ["0", "4", "8", "end // 2", "end", "end + 3", "-1"])
def test_a_truncated_file(tmp_path: Path, cut: str) -> None:
    path = tmp_path / ANN
    upload().save(path)
    whole = path.read_bytes()
    end = 8 + int(struct.unpack("<Q", whole[:8])[0])  # of the header
    places = {"end // 2": end // 2, "end": end, "end + 3": end + 3}
    path.write_bytes(whole[: places[cut] if cut in places else int(cut)])
    for read in (Upload.load, lambda p: aggregate([upload("bob"), p])):
        with refused(str(path), "whole safetensors file", "cut short"):
            read(path)
    with refused_input(str(path), "whole safetensors file", "cut short"):
        Merged.load(path)


FOREIGN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "nothing": (lambda p: None, ("must be a file", "got nothing")),
    "folder": (lambda p: p.mkdir(), ("must be a file", "got a folder")),
    "text": (lambda p: p.write_text("name,age\nann,3\n"), ("safetensors file", "foreign")),
    "plain": (lambda p: save_file({"w": torch.ones(1)}, p), ("maecho upload", "maecho did not write")),
    "odd": (lambda p: save_file({}, p, metadata={"maecho": "[1]"}), ("maecho upload", "maecho did not write")),
    "model": (lambda p: aggregate([upload()]).save(p), ("maecho upload", "got a maecho model")),
    "newer": (lambda p: edited(p, version=files.VERSION + 1), (f"format {files.VERSION}", "newer maecho")),
}


@pytest.mark.parametrize(("make", "parts"), **cases(FOREIGN))
def test_a_foreign_file(tmp_path: Path, make: Callable[[Path], object], parts: tuple[str, ...]) -> None:
    path = tmp_path / ANN
    make(path)
    for read in (Upload.load, lambda p: aggregate([upload("bob"), p])):
        with refused(str(path), *parts):
            read(path)


def test_an_upload_is_not_a_model(tmp_path: Path) -> None:
    upload().save(tmp_path / ANN)
    with refused_input(ANN, "maecho model", "got a maecho upload"):
        Merged.load(tmp_path / ANN)


@pytest.mark.parametrize(
    "key", ["client", "examples", "fingerprint", "statistics", "layers", "head", "aliases", "spaces", "recipe"]
)
def test_a_header_without_an_entry(tmp_path: Path, key: str) -> None:
    path = edited(tmp_path / ANN, **{key: None})
    for read in (Upload.load, lambda p: aggregate([upload("bob"), p])):
        with refused(ANN, "maecho upload", key):
            read(path)


@pytest.mark.parametrize("entry", ["client", "examples", "fingerprint", "statistics", "layers", "aliases"])
def test_a_header_of_the_wrong_kind(tmp_path: Path, entry: str) -> None:
    path = edited(tmp_path / ANN, **{entry: [5]})
    for read in (Upload.load, lambda p: aggregate([upload("bob"), p])):
        with refused("ann"):
            read(path)


KEYS = sorted(upload().tensors())


@pytest.mark.parametrize("key", KEYS)
def test_a_tensor_left_out(tmp_path: Path, key: str) -> None:
    """This holds also for tensors whose absence has a meaning: no labels, no moments, a diagonal matrix."""
    with refused(ANN):
        Upload.load(edited(tmp_path / ANN, lambda tensors: tensors.pop(key)))


RESHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "shorter": lambda tensor: tensor[..., 1:].contiguous(),
    "with one more axis": lambda tensor: tensor.unsqueeze(0).contiguous(),
    "scalar": lambda tensor: tensor.sum(),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", RESHAPED)
def test_a_tensor_of_another_shape(tmp_path: Path, key: str, shape: str) -> None:
    other = RESHAPED[shape](upload().tensors()[key])
    with refused(ANN):
        Upload.load(edited(tmp_path / ANN, lambda tensors: tensors.update({key: other})))


@pytest.mark.parametrize("key", [key for key in KEYS if upload().tensors()[key].is_floating_point()])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_number_that_is_not_finite(tmp_path: Path, key: str, value: float) -> None:
    with refused(ANN, "ann:", "finite", "NaN or infinity"):
        Upload.load(edited(tmp_path / ANN, lambda tensors: tensors.update({key: with_last_entry(tensors[key], value)})))


@pytest.mark.parametrize("part", ["moments", "features/2"])
def test_a_part_left_out_of_header_and_file(tmp_path: Path, part: str) -> None:
    """The header does not list the part either, as if it had never been there."""
    with refused(ANN, part.split("/")[0]):
        Upload.load(edited(tmp_path / ANN, lambda tensors: tensors.pop(f"{part}/means"), listed=False))


@pytest.mark.parametrize("ranks", [[-1, 5, 4], [4, 4, 5], [8, 0, 0]])
def test_covariances_of_other_ranks(tmp_path: Path, ranks: list[int]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["moments/covariances/ranks"] = torch.tensor(ranks)

    with refused(ANN, "covariances"):
        Upload.load(edited(tmp_path / ANN, change))


@pytest.mark.parametrize(("method", "statistic"), [("regmean", "gram"), ("ma-echo", "projector")])
def test_a_statistic_that_the_header_promises(tmp_path: Path, method: str, statistic: str) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(f"{statistic}/")]:
            del tensors[key]

    with refused("ann", statistic):
        aggregate([upload("bob"), edited(tmp_path / ANN, drop)], method)


def test_the_architecture_is_the_one_that_the_header_names(tmp_path: Path) -> None:
    with refused(ANN, "ann's weights", "0123", upload().fingerprint):
        Upload.load(edited(tmp_path / ANN, fingerprint="0123"))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


SAVE: dict[str, Callable[[Path], None]] = {
    "upload": lambda path: upload().save(path),
    "model": lambda path: aggregate([upload()]).save(path),
    "json": lambda path: disk.write_json(path, [1]),
}


@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize(
    ("place", "why"), [("a file/out", "exists|Not a directory"), ("a folder", "got a folder"), ("x" * 300, "too long")]
)
def test_an_output_that_cannot_be_written(tmp_path: Path, save: str, place: str, why: str) -> None:
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "a folder").mkdir()
    before = contents(tmp_path)
    with pytest.raises(UploadError if save == "upload" else InputError, match=f"cannot write .*({why})"):
        SAVE[save](tmp_path / place)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd"), KeyboardInterrupt()])
@pytest.mark.parametrize("old", [b"what was there", None])
def test_a_crash_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, old: bytes | None
) -> None:
    path = tmp_path / ANN
    if old:
        path.write_bytes(old)

    def half(file: BinaryIO, header: object, tensors: object) -> None:
        file.write(b"half a fi")
        raise error

    monkeypatch.setattr(envelope, "write", half)
    for save in (upload().save, aggregate([upload()]).save):
        wanted = UploadError if save == upload().save else InputError
        with pytest.raises(wanted if isinstance(error, OSError) else type(error)) as caught:
            save(path)
        if isinstance(error, OSError):
            assert str(caught.value) == f"cannot write {path}: No space left on device"
        assert contents(tmp_path) == ({str(path): old} if old else {})


def test_saving_again_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / ANN
    upload("bob").save(path)
    upload().save(path)
    assert Upload.load(path).client == "ann"
    assert [p.name for p in path.parent.iterdir()] == [ANN]


def test_weights_that_share_memory_are_written_all_the_same(tmp_path: Path) -> None:
    one = make_upload(network(), batches(), "ann", statistics=())
    twice = Upload("ann", 30, {**one.weights, "again": one.weights["0.weight"]})
    twice.save(tmp_path / ANN)
    assert torch.equal(Upload.load(tmp_path / ANN).weights["again"], one.weights["0.weight"])
