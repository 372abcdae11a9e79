"""Files: every byte is checked, no file is mapped into memory, and only regular files are read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from maecho import InputError, Merged, Upload, UploadError, aggregate
from maecho.upload import envelope, storage
from maecho.upload.envelope import Limits
from support import damage, mutations
from support.tiny import ANN, refused, refused_input, same, saved, upload


def test_no_flipped_bit_is_accepted(tmp_path: Path) -> None:
    content, rng = saved(tmp_path).read_bytes(), random.Random(0)
    for _ in range(1200):
        mutations.flip(rng, content).write(tmp_path / "flipped")
        with pytest.raises(UploadError):
            Upload.load(tmp_path / "flipped")


@pytest.mark.parametrize("make", [lambda: aggregate([upload()]), lambda: upload()], ids=["model", "upload"])
def test_a_flipped_number_is_named(tmp_path: Path, make: Callable[[], Any]) -> None:
    path = tmp_path / "file"
    make().save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    of_a_model = isinstance(make(), Merged)
    with (refused_input if of_a_model else refused)(
        str(path), "must be as it was written, got other bytes in the tensor"
    ):
        (Merged if of_a_model else Upload).load(path)


def test_a_reader_of_some_statistics_checks_what_it_reads(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with storage.opened(path) as file:
        place = file._data + file.listing["gram/0/values"].begin
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert Upload.load(path, only=["fisher"]).has == {"fisher"}
    with refused("gram/0/values"):
        Upload.load(path, only=["gram"])


def test_the_digest_of_the_header_is_the_one_that_is_documented(tmp_path: Path) -> None:
    """The digest is computed as docs/uploads.md describes it for other tools."""
    content = saved(tmp_path).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end])["__metadata__"]
    zeros = content[:end].replace(metadata["sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(zeros).hexdigest() == metadata["sha256"]
    listed = json.loads(metadata["maecho"])["tensors"]
    first = load_file(tmp_path / ANN)["weights/0.weight"]
    assert listed["weights/0.weight"] == hashlib.sha256(first.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("said", ["0" * 64, "", "x", "ABCDEF" * 11])
def test_a_header_with_another_digest(tmp_path: Path, said: str) -> None:
    header, data = damage.split(saved(tmp_path).read_bytes())
    content = json.loads(header)
    content[envelope.METADATA][storage.DIGEST] = said
    (tmp_path / ANN).write_bytes(damage.joined(json.dumps(content).encode(), data))
    with refused(ANN, "must be as it was written, got another header"):
        Upload.load(tmp_path / ANN)
    del content[envelope.METADATA][storage.DIGEST]
    (tmp_path / ANN).write_bytes(damage.joined(json.dumps(content).encode(), data))
    with refused(ANN, "must be as it was written, got a header without its digest"):
        Upload.load(tmp_path / ANN)


def test_what_was_read_stays_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = Upload.load(path)
    before = {name: tensor.clone() for name, tensor in found.tensors().items()}
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(os.urandom(path.stat().st_size // 2))
        file.truncate(1000)
    assert same(found.tensors(), before)


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with storage.opened(path, "upload") as file:
        os.truncate(path, path.stat().st_size - 8)
        with refused(str(path), "must stay as it is while it is read", "cut short"):
            file.read_all()


def test_a_file_that_is_rewritten_while_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with storage.opened(path, "upload") as file:
        with path.open("r+b") as other:
            other.seek(-8, os.SEEK_END)
            other.write(b"rewritten"[:8])
        with refused(str(path), "as it was written"):
            file.read_all()


@pytest.mark.parametrize("dtype", envelope.DTYPES.values(), ids=str)
def test_every_dtype_and_shape_is_written_and_read(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.arange(-6, 6).to(dtype)
    tensors = {"a": numbers.reshape(3, 4).T, "scalar": numbers[3], "empty": numbers[:0].reshape(0, 3), "é": numbers}
    storage.write_tensors(tmp_path / "file", "model", tensors, {})
    assert same(storage.read_tensors(tmp_path / "file"), {k: t.contiguous() for k, t in tensors.items()})
    assert same(load_file(tmp_path / "file"), {k: t.contiguous() for k, t in tensors.items()})


@pytest.mark.parametrize(
    ("tensor", "part"),
    [(torch.zeros(2, dtype=torch.complex64), "complex64"), (torch.zeros(2).to(torch.float8_e5m2), "float8")],
)
def test_numbers_that_a_file_cannot_hold(tmp_path: Path, tensor: Tensor, part: str) -> None:
    with refused_input("cannot write", "'w'", part):
        storage.write_tensors(tmp_path / "file", "model", {"w": tensor}, {})
    assert not list(tmp_path.iterdir())


def test_writing_makes_no_second_copy(tmp_path: Path) -> None:
    code = (
        "import resource, torch; from pathlib import Path; from maecho.upload import storage; "
        "t = {f'{i}': torch.full((2**20, 8), float(i)) for i in range(8)}; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        f"storage.write_tensors(Path({str(tmp_path / 'file')!r}), 'model', t, {{}}); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert grown * 1024 < 64 * 2**20  # of 256 MiB


def test_limits_of_file_and_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    size = path.stat().st_size
    with refused(f"at most {size - 1} bytes, got {size}", "MAECHO_MAX_FILE"):
        Upload.load(path, limits=Limits(file=size - 1))
    with refused("header of at most 100 bytes, got", "MAECHO_MAX_HEADER"):
        Upload.load(path, limits=Limits(header=100))
    monkeypatch.setenv("MAECHO_MAX_FILE", "1 kB")
    for read in (Upload.load, lambda p: aggregate([p])):
        with refused("at most 1000 bytes", "MAECHO_MAX_FILE"):
            read(path)
    monkeypatch.setenv("MAECHO_MAX_FILE", "2 GB")
    monkeypatch.setenv("MAECHO_MAX_HEADER", "100")
    assert Limits.of_environment() == Limits(2 * 10**9, 100)
    assert Upload.load(path, limits=Limits()).client == "ann"
    monkeypatch.setenv("MAECHO_MAX_HEADER", "much")
    with refused("MAECHO_MAX_HEADER", "'much'", error=InputError):
        Upload.load(path)
    with refused("limit of the file", "got 0", error=InputError):
        Limits(file=0)


def test_a_header_of_the_largest_size_is_read_in_time(tmp_path: Path) -> None:
    """The header that takes most memory is one of lists in a list."""
    header = b'{"__metadata__":{},"a":[' + b"[]," * (8 * 2**20 // 3 - 20) + b"[]]}"
    (tmp_path / ANN).write_bytes(damage.joined(header, b""))
    began = time.perf_counter()
    with refused(ANN, "cut short or foreign"):
        Upload.load(tmp_path / ANN)
    assert time.perf_counter() - began < 20


def test_a_pipe_a_socket_a_device_and_a_folder_are_no_uploads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
        (tmp_path / "folder").mkdir()
        (tmp_path / "link").symlink_to("pipe")
        for name, kind in (("pipe", "a pipe"), ("socket", "a socket"), ("folder", "a folder"), ("link", "a pipe")):
            with refused(str(tmp_path / name), "must be a file", f"got {kind}"):
                Upload.load(tmp_path / name)
    with refused("/dev/zero", "must be a file, got a device"):
        Upload.load("/dev/zero")
    with refused("must be a file, got an error: embedded null byte"):
        Upload.load("a\0b")


def test_a_link_to_an_upload_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved(tmp_path).name)
    assert Upload.load(tmp_path / "link").client == "ann"
