"""Data sets: shapes, scaling, and files that are missing or broken."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from maecho.lab.data import DATASETS, Dataset, batches, cifar10, digits, load, mnist

RNG = np.random.default_rng(0)
PIXELS = {"train": RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8), "t10k": np.full((3, 28, 28), 255, np.uint8)}
LABELS = {"train": np.arange(6, dtype=np.uint8), "t10k": np.array([9, 0, 9], np.uint8)}
IMAGES = "train-images-idx3-ubyte"


def idx(array: np.ndarray) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes()


def write_mnist(folder: Path, gzipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        for name, array in ((f"{part}-images-idx3-ubyte", PIXELS[part]), (f"{part}-labels-idx1-ubyte", LABELS[part])):
            if gzipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))


def cifar_arrays() -> dict[str, np.ndarray]:
    return {
        "x_train": RNG.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8),
        "y_train": np.array([[0], [1], [2], [9]]),
        "x_test": np.zeros((2, 32, 32, 3), dtype=np.uint8),
        "y_test": np.array([3, 4], dtype=np.uint8),
    }


def small(**changes: object) -> Dataset:
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    return Dataset(**{"name": "small", "x_train": x, "y_train": y, "x_test": x, "y_test": y, "classes": 2, **changes})  # type: ignore[arg-type]


def test_digits_are_split_by_class_and_standardised() -> None:
    data = digits()
    assert data.x_train.shape == (1347, 1, 8, 8)
    assert data.x_test.shape == (450, 1, 8, 8)
    assert abs(data.x_train.mean().item()) < 1e-5
    assert data.x_train.std().item() == pytest.approx(1, abs=1e-5)
    counts = torch.bincount(data.y_train, minlength=10), torch.bincount(data.y_test, minlength=10)
    assert ((counts[1] - (counts[0] + counts[1]) / 4).abs() < 1).all()
    assert torch.equal(data.x_test, digits().x_test)


def test_digits_share_no_example_between_training_and_test() -> None:
    data = digits()
    joined = torch.cat([data.x_train, data.x_test]).flatten(1)
    assert len(joined) == 1797
    assert len(torch.unique(joined, dim=0)) == 1797


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("sub", ["", "mnist"])
def test_mnist_reads_idx_files(tmp_path: Path, sub: str, gzipped: bool) -> None:
    write_mnist(tmp_path / sub, gzipped)
    data = mnist(tmp_path)
    assert data.x_train.shape == (6, 1, 28, 28)
    assert data.y_train.tolist() == list(range(6))
    assert data.y_test.tolist() == [9, 0, 9]
    expected = (torch.from_numpy(PIXELS["train"]).double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(data.x_train[:, 0].double(), expected, atol=1e-6, rtol=0)
    assert data.x_test.flatten().tolist() == pytest.approx([(1 - 0.1307) / 0.3081] * 3 * 784)


def test_maecho_data_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    monkeypatch.setenv("MAECHO_DATA", str(tmp_path))
    assert len(load("mnist").y_train) == 6


def test_without_maecho_data_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAECHO_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_mnist(tmp_path / ".cache" / "maecho" / "data" / "mnist")
    assert len(load("mnist").y_train) == 6


@pytest.mark.mnist
def test_the_real_mnist() -> None:
    try:
        data = load("mnist")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert data.x_test.shape == (10_000, 1, 28, 28)
    assert torch.bincount(data.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(data.x_train.mean().item()) < 1e-3
    assert data.x_train.std().item() == pytest.approx(1, abs=1e-3)


def test_a_missing_mnist_says_what_to_set(tmp_path: Path) -> None:
    message = (
        f"mnist: {tmp_path} has no {IMAGES} or {IMAGES}.gz, neither there nor in its folder mnist; "
        "set MAECHO_DATA to the folder that holds the data"
    )
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(PIXELS["train"])[:-1], "shape (6, 28, 28) needs 4720 bytes, got 4719"),
        (idx(PIXELS["train"]) + b"x", "shape (6, 28, 28) needs 4720 bytes, got 4721"),
        (idx(PIXELS["train"])[:9], "truncated, a header of 16 bytes is expected, got 9"),
        (idx(LABELS["train"]), "an idx file of bytes with 3 axes starts with 00000803, got 00000801"),
        (b"", "an idx file of bytes with 3 axes starts with 00000803, got "),
    ],
)
def test_broken_idx_files(tmp_path: Path, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / IMAGES).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / IMAGES}: {message}")):
        mnist(tmp_path)


@pytest.mark.parametrize(
    "content", [gzip.compress(idx(PIXELS["train"]))[:-20], b"no gzip", b"\x1f\x8b\x08" + b"x" * 40]
)
def test_broken_gzip_files(tmp_path: Path, content: bytes) -> None:
    write_mnist(tmp_path, gzipped=True)
    (tmp_path / f"{IMAGES}.gz").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{IMAGES}.gz: not a whole gzip file (")):
        mnist(tmp_path)


def test_cifar10_is_channels_first_and_standardised_by_channel(tmp_path: Path) -> None:
    arrays = cifar_arrays()
    (tmp_path / "cifar10").mkdir()
    np.savez(tmp_path / "cifar10" / "cifar10.npz", **arrays)  # type: ignore[arg-type]
    data = cifar10(tmp_path)
    assert data.y_train.tolist() == [0, 1, 2, 9]
    assert data.x_train.shape == (4, 3, 32, 32)
    expected = (arrays["x_train"] - np.array([125.3, 123.0, 113.9])) / np.array([63.0, 62.1, 66.7])
    torch.testing.assert_close(
        data.x_train.double(), torch.from_numpy(expected.transpose(0, 3, 1, 2)), atol=1e-5, rtol=0
    )


def test_broken_cifar10(tmp_path: Path) -> None:
    path = tmp_path / "cifar10.npz"
    with pytest.raises(FileNotFoundError, match=r"cifar10: .* has no cifar10.npz .*set MAECHO_DATA"):
        cifar10(tmp_path)
    path.write_bytes(b"neither zip nor npy")
    with pytest.raises(ValueError, match=re.escape(f"{path}: not a readable .npz file (")):
        cifar10(tmp_path)
    np.savez(path, x_train=np.zeros(3))
    message = f"{path}: must hold x_train, y_train, x_test, y_test, lacks y_train, x_test, y_test"
    with pytest.raises(ValueError, match=re.escape(message)):
        cifar10(tmp_path)
    np.savez(path, **{**cifar_arrays(), "x_test": np.zeros((2, 3, 32, 32))})  # type: ignore[arg-type]
    message = "cifar10: x_test must be uint8 [n, 32, 32, 3], got float64 [2, 3, 32, 32]"
    with pytest.raises(ValueError, match=re.escape(message)):
        cifar10(tmp_path)


def test_batches_cover_the_data_in_order_without_a_generator() -> None:
    x, y = torch.arange(10.0).view(10, 1), torch.arange(10)
    parts = batches(x, y, size=4)
    for _ in range(2):
        seen = list(parts)
        assert len(parts) == len(seen) == 3
        assert [len(b) for _, b in seen] == [4, 4, 2]
        assert torch.equal(torch.cat([a for a, _ in seen]), x)


def test_batches_with_a_generator_are_shuffled_anew_and_reproducible() -> None:
    x, y = torch.arange(50.0).view(50, 1), torch.arange(50)
    parts = batches(x, y, size=8, rng=torch.Generator().manual_seed(0))
    first, second = (torch.cat([b for _, b in parts]) for _ in range(2))
    again = torch.cat([b for _, b in batches(x, y, size=8, rng=torch.Generator().manual_seed(0))])
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(50))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert all(torch.equal(a[:, 0].long(), b) for a, b in parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_train": torch.zeros(2, 3, dtype=torch.float64)},
            "small: train inputs must be float32 and labels int64, got torch.float64 and torch.int64",
        ),
        (
            {"y_test": torch.zeros(3, dtype=torch.int64)},
            "small: test needs one label an input, got inputs (2, 3) and labels (3,)",
        ),
        ({"y_train": torch.tensor([0, 2])}, "small: train labels must lie in 0..1, got 0..2"),
        ({"x_test": torch.zeros(2, 4)}, "small: train and test inputs must have one shape, got (3,) and (4,)"),
    ],
)
def test_a_dataset_is_checked_at_birth(changes: dict[str, object], message: str) -> None:
    assert repr(small()) == "Dataset(name='small', classes=2)"
    with pytest.raises(ValueError, match=re.escape(message)):
        small(**changes)


def test_messages() -> None:
    with pytest.raises(ValueError, match=f"load: no data set 'svhn', known are {', '.join(DATASETS)}"):
        load("svhn")
    x, y = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match="batches: size must be at least 1, got 0"):
        batches(x, y, size=0)
    with pytest.raises(ValueError, match="batches: one label an input, got 2 inputs and 1 labels"):
        batches(x, y[:1])
