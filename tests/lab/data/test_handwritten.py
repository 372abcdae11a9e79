"""Digits, MNIST, its writers and USPS: shapes, scaling, and files that are missing, broken or other ones."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from maecho.errors import InputError
from maecho.lab.data import digits, load, mnist, usps
from maecho.lab.data.known import KNOWN, Known
from support.datafiles import LABELS, PIXELS, WRITERS, idx, mnist_files, npz_arrays, qmnist, write_mnist

IMAGES = "train-images-idx3-ubyte"
AUTHORS = "qmnist-train-labels-idx2-int"


def test_digits_are_split_by_class_and_standardised() -> None:
    data = digits()
    assert data.x_train.shape == (1347, 1, 8, 8)
    assert data.x_test.shape == (450, 1, 8, 8)
    assert abs(data.x_train.mean().item()) < 1e-5
    assert data.x_train.std().item() == pytest.approx(1, abs=1e-5)
    counts = torch.bincount(data.y_train, minlength=10), torch.bincount(data.y_test, minlength=10)
    assert ((counts[1] - (counts[0] + counts[1]) / 4).abs() < 1).all()
    assert data.digest == digits().digest
    sixteenths = 16 * data.pixels(data.x_test)
    torch.testing.assert_close(sixteenths, sixteenths.round(), atol=1e-4, rtol=0)


def test_digits_share_no_example_between_training_and_test() -> None:
    data = digits()
    joined = torch.cat([data.x_train, data.x_test]).flatten(1)
    assert len(joined) == 1797
    assert len(torch.unique(joined, dim=0)) == 1797


@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("sub", ["", "mnist"])
def test_mnist_reads_idx_files(tmp_path: Path, sub: str, gzipped: bool) -> None:
    write_mnist(tmp_path / sub, gzipped)
    data = mnist(tmp_path)
    assert data.x_train.shape == (6, 1, 28, 28)
    assert data.y_train.tolist() == list(range(6))
    assert data.y_test.tolist() == [9, 0, 9]
    assert data.groups_train is None
    expected = (torch.from_numpy(PIXELS["train"]).double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(data.x_train[:, 0].double(), expected, atol=1e-6, rtol=0)
    assert data.x_test.flatten().tolist() == pytest.approx([(1 - 0.1307) / 0.3081] * 3 * 784)


@pytest.mark.usefixtures("own_files")
def test_writers_are_groups(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = mnist(tmp_path, writers=True)
    assert data.name == "mnist-writers"
    assert data.groups_train is not None
    assert data.groups_test is not None
    assert data.group_names == ("5", "7", "40", "2000", "3000")
    for groups, part in ((data.groups_train, "train"), (data.groups_test, "t10k")):
        assert [int(data.group_names[g]) for g in groups] == WRITERS[part].tolist()
    assert torch.equal(data.x_train, mnist(tmp_path).x_train)
    assert data.digest != mnist(tmp_path).digest


@pytest.mark.usefixtures("own_files")
def test_maecho_data_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    monkeypatch.setenv("MAECHO_DATA", str(tmp_path))
    assert len(load("mnist").y_train) == 6
    assert load("mnist-writers").groups_train is not None


@pytest.mark.usefixtures("own_files")
def test_without_maecho_data_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAECHO_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_mnist(tmp_path / ".cache" / "maecho" / "data" / "mnist")
    assert len(load("mnist").y_train) == 6


def test_a_missing_mnist_says_where_one_gets_it(tmp_path: Path) -> None:
    message = (
        f"mnist: {tmp_path} has no {IMAGES} or {IMAGES}.gz, neither there nor in its folder mnist; get it from a copy "
        "of yann.lecun.com/exdb/mnist (four idx files), or load 'hub:mnist' through Hugging Face datasets "
        "(pip install 'maecho[hub]'), and set MAECHO_DATA to the folder that holds the data"
    )
    for error in (InputError, FileNotFoundError):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            mnist(tmp_path)


@pytest.mark.usefixtures("own_files")
def test_missing_writers_say_where_one_gets_them(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / AUTHORS).unlink()
    mnist(tmp_path)
    with pytest.raises(InputError, match=f"has no {AUTHORS} .*; get it from github.com/facebookresearch/qmnist, and"):
        mnist(tmp_path, writers=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(PIXELS["train"])[:-1], "shape (6, 28, 28) needs 4720 bytes, got 4719"),
        (idx(PIXELS["train"]) + b"x", "shape (6, 28, 28) needs 4720 bytes, got 4721"),
        (idx(PIXELS["train"])[:9], "truncated, a header of 16 bytes is expected, got 9"),
        (idx(LABELS["train"]), "an idx file of bytes with 3 axes starts with 00000803, got 00000801"),
        (b"", "an idx file of bytes with 3 axes starts with 00000803, got nothing"),
    ],
)
def test_broken_idx_files(tmp_path: Path, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / IMAGES).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / IMAGES}: {message}")):
        mnist(tmp_path)


@pytest.mark.parametrize(
    "content", [gzip.compress(idx(PIXELS["train"]))[:-20], b"no gzip", b"\x1f\x8b\x08" + b"x" * 40]
)
def test_broken_gzip_files(tmp_path: Path, content: bytes) -> None:
    write_mnist(tmp_path, gzipped=True)
    (tmp_path / f"{IMAGES}.gz").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{IMAGES}.gz: not a whole gzip file (")):
        mnist(tmp_path)


@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            qmnist(LABELS["train"][::-1].copy(), WRITERS["train"]),
            "column 0 must be MNIST's labels, got another in 6 rows, the first is row 0",
        ),
        (
            qmnist(LABELS["train"], WRITERS["train"])[:5],
            "must have 8 columns and 6 rows or more, got (5, 8)",
        ),
        (
            qmnist(LABELS["train"], WRITERS["train"])[:, :7],
            "must have 8 columns and 6 rows or more, got (6, 7)",
        ),
        (PIXELS["train"][0], "an idx file of 32-bit numbers with 2 axes starts with 00000c02, got 00000802"),
    ],
)
def test_broken_writers(tmp_path: Path, table: np.ndarray, message: str) -> None:
    write_mnist(tmp_path, **{AUTHORS: table})
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / AUTHORS}: {message}")):
        mnist(tmp_path, writers=True)


def test_labels_beyond_nine(tmp_path: Path) -> None:
    file = "t10k-labels-idx1-ubyte"
    write_mnist(tmp_path, **{file: np.array([9, 10, 0], np.uint8)})
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / file}: labels must lie in 0..9, got 0..10")):
        load_own(tmp_path)


def load_own(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAECHO_DATA_UNCHECKED", "1")
        mnist(folder)


@pytest.mark.usefixtures("known_files_only")
def test_other_files_are_refused_unless_asked_for(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    message = (
        f"{tmp_path / IMAGES}: {IMAGES} of mnist must have shape (60000, 28, 28), got (6, 28, 28); "
        "MAECHO_DATA_UNCHECKED=1 takes files of your own"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        mnist(tmp_path)
    load_own(tmp_path)


@pytest.mark.usefixtures("known_files_only")
def test_a_swapped_label_or_another_pixel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is that of the values, little-endian in QMNIST's table of the rows that are MNIST's."""
    for name, array in mnist_files().items():
        part = "mnist-writers" if name.startswith("qmnist") else "mnist"
        used = array[: len(LABELS["t10k"])] if name == "qmnist-test-labels-idx2-int" else array
        content = hashlib.sha256(used.astype(used.dtype.newbyteorder("<")).tobytes()).hexdigest()
        monkeypatch.setitem(KNOWN[part], name, Known(used.shape, content))
    write_mnist(tmp_path)
    assert len(mnist(tmp_path, writers=True).group_names) == 5
    for file in (IMAGES, "train-labels-idx1-ubyte", AUTHORS):
        changed = mnist_files()[file].copy()
        changed.reshape(-1)[[2, 3]] = changed.reshape(-1)[[3, 2]]
        write_mnist(tmp_path, **{file: changed})
        with pytest.raises(InputError, match=re.escape(f"{tmp_path / file}: {file} of mnist") + ".* have the SHA-256"):
            mnist(tmp_path, writers=True)


@pytest.mark.usefixtures("own_files")
def test_usps_is_as_scanned(tmp_path: Path) -> None:
    arrays = npz_arrays((16, 16))
    np.savez(tmp_path / "usps.npz", **arrays)  # type: ignore[arg-type]
    data = usps(tmp_path)
    assert data.x_train.shape == (4, 1, 16, 16)
    assert data.y_train.tolist() == [0, 1, 2, 9]
    expected = torch.from_numpy(arrays["x_train"]).float().unsqueeze(1) / 255
    torch.testing.assert_close(data.pixels(data.x_train), expected, atol=1e-6, rtol=0)
    with pytest.raises(InputError, match=r"usps: .* has no usps.npz, .* get it from the libsvm data sets"):
        usps(tmp_path / "elsewhere")


@pytest.mark.mnist
def test_the_real_mnist_and_its_writers() -> None:
    try:
        data = load("mnist-writers")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert data.x_test.shape == (10_000, 1, 28, 28)
    assert torch.bincount(data.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(data.x_train.mean().item()) < 1e-3
    assert data.x_train.std().item() == pytest.approx(1, abs=1e-3)
    assert data.groups_train is not None
    assert data.groups_test is not None
    train, test = set(data.groups_train.tolist()), set(data.groups_test.tolist())
    assert (len(train), len(test), len(train & test)) == (539, 297, 0)
    assert data.digest == "5d296a46e25ba79f374d510e6c649caafaa0447f852f93b96933a4bd48830934"


@pytest.mark.data
def test_the_real_usps() -> None:
    try:
        data = load("usps")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert (len(data.y_train), len(data.y_test)) == (7291, 2007)
    assert abs(data.x_train.mean().item()) < 1e-3
    assert data.x_train.std().item() == pytest.approx(1, abs=1e-3)
