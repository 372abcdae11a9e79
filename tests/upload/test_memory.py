"""Files take little memory: bad ones are refused before it is reserved, good ones are checked piece by piece."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from maecho import InputError, Merged, Upload, UploadError
from maecho.linalg.finite import is_finite
from maecho.linalg.spectra import AT_ONCE, Spectrum
from maecho.upload import header, storage
from support import damage, mutations
from support.tiny import ANN, INF, NAN, refused, refused_input, saved

MEGABYTE = 2**20


def sparse(path: Path, size: int) -> Path:
    """A file whose header is right but for the shape of one tensor, which is a hole."""
    mutations.with_hole(path.read_bytes(), "weights/0.weight", "F32", size).write(path)
    return path


@pytest.mark.parametrize("size", [64 * MEGABYTE, 3 * 2**30])
def test_a_sparse_file_says_how_much_is_stored(tmp_path: Path, size: int) -> None:
    path = sparse(saved(tmp_path), size + MEGABYTE)
    stored, size = path.stat().st_blocks * 512, path.stat().st_size
    with refused(f"{path} must be stored as a whole, got a sparse file: {stored} of its {size} bytes are stored"):
        Upload.load(path)
    with refused_input(str(path), "got a sparse file"):
        Merged.load(path)


def test_a_small_sparse_file_is_judged_by_what_it_says(tmp_path: Path) -> None:
    with refused(ANN, "'0.weight' must have at least 2 axes"):
        Upload.load(sparse(saved(tmp_path), 63 * MEGABYTE))


def test_a_file_system_that_tells_no_blocks_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sparse(saved(tmp_path), 65 * MEGABYTE)

    class Told:
        st_size, st_blocks, st_mode = path.stat().st_size, 0, path.stat().st_mode

    monkeypatch.setattr(storage.os, "fstat", lambda descriptor: Told)
    with refused(ANN, "'0.weight' must have at least 2 axes"):
        Upload.load(path)


def test_a_sparse_file_is_judged_before_memory_is_given_to_it(tmp_path: Path) -> None:
    """Whatever tensor is a hole, and although digests and offsets are right."""
    rng = random.Random(0)
    path = saved(tmp_path)
    content = path.read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = set()
    for _ in range(60):
        mutations._hole(rng, content).write(path)
        with pytest.raises(UploadError) as caught:
            Upload.load(path)
        said.add(next((word for word in SENTENCES if word in str(caught.value)), str(caught.value)))
    assert said <= set(SENTENCES)
    assert len(said) > 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


SENTENCES = (
    "must be given with one unit for each of its",
    "must be given by eigenvectors [groups, inputs, rank] to its eigenvalues",
    "must be of at most 4294967296 bytes, got",
    "got a sparse file",
    "bytes of tensors, where its header lists",
    "to be read as a matrix, got",
    "must have one entry for each of the",
    "statistics must hold at most 262144 whole numbers, got",
    "must be whole numbers, got torch.",
    "must be of floating point, got torch.",
    "must be given by eigenvalues [groups, rank], got shape",
    "must fit together, got others (",
    "must have its weight's shape",
)
"""The reasons for which a file with a hole is refused."""


def test_a_header_of_100_megabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 30 s and 2.5 GB. The length is judged before a byte of the header is read."""
    path, length = tmp_path / ANN, 10**8
    path.write_bytes(length.to_bytes(8, "little") + b"{")
    with refused(f"{path} must be a whole safetensors file, got one that is cut short or foreign (a header of {length} "
                 "bytes in a file of 9)"):  # fmt: skip
        Upload.load(path)
    with path.open("r+b") as file:
        file.truncate(length + 8)
    with refused(ANN, "got a sparse file"):
        Upload.load(path)
    monkeypatch.setattr(storage, "_SPARSE", 2**40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused(f"{path} must have a header of at most 8388608 bytes, got {length}; the environment variable "
                 "MAECHO_MAX_HEADER allows larger headers"):  # fmt: skip
        Upload.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def no_memory(*arguments: Any, **options: Any) -> Tensor:
    return torch.zeros(2**60, dtype=torch.uint8)  # the sentence is torch's own


@pytest.mark.parametrize("what", ["torch", "python"])
def test_a_file_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    path = saved(tmp_path)

    def full(*arguments: Any, **options: Any) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(storage.torch, "empty", no_memory if what == "torch" else full)
    with refused(f"{path} must fit into memory, got one that is too large for this machine"):
        Upload.load(path)


def test_other_errors_of_torch_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr(storage.File, "read", lambda file, name: (_ for _ in ()).throw(RuntimeError("odd")))
    with pytest.raises(RuntimeError, match="odd"):
        Upload.load(path)


def test_memory_that_is_short_during_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr("maecho.upload.checks.is_finite", no_memory)
    with refused(f"{path} must fit into memory"):
        Upload.load(path)


LARGE = """
import resource, sys, torch
from pathlib import Path
from maecho import Upload
from maecho.linalg.spectra import Spectrum
from maecho.network.layers import Layer
n, path = 2048, Path(sys.argv[2])
if sys.argv[1] == "read":
    (torch.ones(4, 4) @ torch.ones(4, 4)).aminmax()
    import maecho.upload.upload
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Upload.load(path)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / path.stat().st_size)
else:
    rng, half = torch.Generator().manual_seed(0), torch.float16
    basis = torch.linalg.qr(torch.randn(1, n, 256, generator=rng)).Q.half()
    weights = {"0.weight": torch.randn(n, n, generator=rng).half(), "x": torch.zeros(2**23, dtype=half)}
    known = {"gram": {"0": Spectrum(torch.ones(1, 256).double(), basis)},
             "fisher": {"0.weight": torch.rand(n, n, generator=rng).half(), "x": torch.ones(2**23, dtype=half)}}
    Upload("ann", 5, weights, (Layer("0", "0.weight"),), statistics=known).save(path)
"""


@pytest.mark.slow
def test_a_good_file_takes_little_more_memory_than_its_tensors(tmp_path: Path) -> None:
    """Numbers of 16 bits: checked all at once, they would take four times as much."""

    def run(what: str) -> str:
        command = [sys.executable, "-c", LARGE, what, str(tmp_path / ANN)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    run("write")
    assert float(run("read")) < 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_finite_numbers(dtype: torch.dtype) -> None:
    numbers = torch.linspace(-3, 3, 24).reshape(2, 3, 4).to(dtype)
    assert is_finite(numbers)
    assert is_finite(numbers.mT)
    assert is_finite(numbers[:0])
    for value in (NAN, INF, -INF):
        other = numbers.float()
        other[1, 2, 0] = value
        assert not is_finite(other.to(dtype))
        assert not is_finite(other.to(dtype).mT)


@pytest.mark.parametrize("at_once", [1, 7, AT_ONCE])
def test_a_basis_is_looked_at_piece_by_piece(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("maecho.linalg.spectra.AT_ONCE", at_once)
    basis = torch.linalg.qr(torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))).Q
    values = torch.tensor([[3.0, 2, 1, 0]]).expand(3, 4)
    assert Spectrum(values, basis).complaint() is None
    unused, wrong = basis.clone(), basis.clone()
    unused[2, 5, 3] += 1  # the direction of an eigenvalue 0 does not matter
    wrong[2, 5, 1] += 1
    assert Spectrum(values, unused).complaint() is None
    assert str(Spectrum(values, wrong).complaint()).startswith("given by orthonormal eigenvectors, got UᵀU off by")


def test_more_eigenvectors_than_inputs() -> None:
    wide = Spectrum(torch.ones(1, 3), torch.eye(2, 3)[None])
    assert wide.malformed() == "given by at most 2 eigenvectors, one for each input, got 3"


def test_real_numbers_in_place_of_counts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing them took 3 GB for a sparse file of 256 MB."""
    path = saved(tmp_path)
    about, tensors = storage.read_about(path, "upload"), load_file(path)
    damage.forged(path, {**tensors, "classes": torch.zeros(header.WHOLE + 1)}, about)
    monkeypatch.setattr(storage.File, "read", lambda file, name: pytest.fail("it was read"))
    with refused(str(path), "ann: classes must be whole numbers, got torch.float32"):
        Upload.load(path)


def test_errors_of_models_are_not_those_of_uploads(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"nothing")
    for read in (Merged.load, storage.read_tensors, lambda path: storage.read_about(path, "relay")):
        with refused_input("must be a whole safetensors file, got"):
            read(tmp_path / "model")
    with pytest.raises(InputError, match="a tensor must have a name"):
        storage.write_tensors(tmp_path / "out", "model", {"": torch.ones(1)}, {})
