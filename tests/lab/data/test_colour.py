"""CIFAR-10 and CIFAR-100: scaling, damaged files and known content."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from maecho.errors import InputError
from maecho.lab.data import Dataset, cifar10, cifar100, load
from maecho.lab.data.known import KNOWN, Known
from support.datafiles import npz_arrays

LOADERS = {"cifar10": cifar10, "cifar100": cifar100}
SCALES = {
    "cifar10": ([125.3, 123.0, 113.9], [63.0, 62.1, 66.7]),
    "cifar100": ([129.3, 124.1, 112.4], [68.2, 65.4, 70.4]),
}


@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize(("name", "loader"), LOADERS.items())
def test_channels_come_first_and_are_standardised(tmp_path: Path, name: str, loader: Callable[[Path], Dataset]) -> None:
    arrays = npz_arrays()
    (tmp_path / name).mkdir()
    np.savez(tmp_path / name / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    data = loader(tmp_path)
    assert data.y_train.tolist() == [0, 1, 2, 9]
    assert data.classes == {"cifar10": 10, "cifar100": 100}[name]
    assert data.x_train.shape == (4, 3, 32, 32)
    mean, std = SCALES[name]
    expected = torch.from_numpy(((arrays["x_train"] - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2))
    torch.testing.assert_close(data.x_train.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("own_files")
def test_broken_npz_files(tmp_path: Path) -> None:
    path = tmp_path / "cifar10.npz"
    with pytest.raises(FileNotFoundError, match=r"cifar10: .* has no cifar10.npz.*hub:cifar10.*set MAECHO_DATA"):
        cifar10(tmp_path)
    path.write_bytes(b"neither zip nor npy")
    with pytest.raises(InputError, match=re.escape(f"{path}: not a readable .npz file (")):
        cifar10(tmp_path)
    np.savez(path, **npz_arrays())  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=re.escape(f"{path}: not a readable .npz file (")):
        cifar10(tmp_path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InputError, match=re.escape(f"{path}: not a readable .npz file (")):
        cifar10(tmp_path)
    np.savez(path, x_train=np.zeros(3))
    message = f"{path}: must hold x_train, y_train, x_test, y_test, lacks y_train, x_test, y_test"
    with pytest.raises(InputError, match=re.escape(message)):
        cifar10(tmp_path)


@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": np.zeros((2, 3, 32, 32))}, "x_test must be uint8 [n, 32, 32, 3], got float64 [2, 3, 32, 32]"),
        ({"y_train": np.arange(3)}, "y_train must be 4 whole numbers, got int64 [3]"),
        ({"y_train": np.ones(4)}, "y_train must be 4 whole numbers, got float64 [4]"),
        ({"y_test": np.array([3, 10])}, "y_test must lie in 0..9, got 3..10"),
        ({"y_test": np.array([3, -1])}, "y_test must lie in 0..9, got -1..3"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "cifar10.npz"
    np.savez(path, **{**npz_arrays(), **changes})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
        cifar10(tmp_path)


@pytest.mark.usefixtures("known_files_only")
@pytest.mark.parametrize("changed", [None, "x_train", "y_train", "x_test", "y_test"])
def test_one_value_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str | None) -> None:
    """One pixel, or one label that was swapped, in a file whose content is known."""
    arrays, path = npz_arrays(), tmp_path / "cifar10.npz"
    known = {key: Known(a.reshape(-1).shape if key[0] == "y" else a.shape, content(a)) for key, a in arrays.items()}
    monkeypatch.setitem(KNOWN, "cifar10", known)
    if changed:
        arrays[changed].reshape(-1)[-1] = 7
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    if changed is None:
        assert len(cifar10(tmp_path).y_train) == 4
        return
    message = (
        f"{path}: {changed} of cifar10 must have the SHA-256 {known[changed].sha256[:16]}…, got "
        f"{content(arrays[changed])[:16]}…: it is damaged or another edition; "
        "MAECHO_DATA_UNCHECKED=1 takes files of your own"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        cifar10(tmp_path)
    monkeypatch.setenv("MAECHO_DATA_UNCHECKED", "1")
    cifar10(tmp_path)


def content(array: np.ndarray) -> str:
    import hashlib

    return hashlib.sha256(array.astype(np.uint8).tobytes()).hexdigest()


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("cifar10", "40f22324f843ac678510326baf76e2dc6c399b3f4dc7732ccfa5c395c8ab7e7e"),
        ("cifar100", "5f24bf4c0f37f72b9837c115078b57b20958076f07d517c37075307ed50b50c4"),
    ],
)
def test_the_real_files(name: str, digest: str) -> None:
    try:
        data = load(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert len(set(torch.bincount(data.y_train).tolist())) == 1
    assert len(data.y_test) == 10_000
    assert data.x_train.mean().abs() < 1e-3
    assert data.digest == digest
