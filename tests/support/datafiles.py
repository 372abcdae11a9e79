"""Small data files of the layouts that maecho reads."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

RNG = np.random.default_rng(0)
PIXELS = {"train": RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8), "t10k": np.full((3, 28, 28), 255, np.uint8)}
LABELS = {"train": np.arange(6, dtype=np.uint8), "t10k": np.array([9, 0, 9], np.uint8)}
WRITERS = {"train": np.array([7, 7, 40, 7, 40, 2000]), "t10k": np.array([5, 5, 3000])}


def idx(array: np.ndarray) -> bytes:
    """An idx file of bytes, or of 32-bit numbers."""
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    code = {1: 0x08, 4: 0x0C}[array.dtype.itemsize]
    return bytes([0, 0, code, array.ndim]) + lengths + array.astype(array.dtype.newbyteorder(">")).tobytes()


def qmnist(labels: np.ndarray, writers: np.ndarray) -> np.ndarray:
    """QMNIST's table for these digits: int32 [n, 8]."""
    table = np.zeros((len(labels), 8), np.int32)
    table[:, 0], table[:, 2], table[:, 4] = labels, writers, labels + 30
    return table


def mnist_files() -> dict[str, np.ndarray]:
    """MNIST's four files with six and three examples, and QMNIST's two, whose test table is longer than MNIST's."""
    files = {}
    for part, other in (("train", "train"), ("t10k", "test")):
        files[f"{part}-images-idx3-ubyte"], files[f"{part}-labels-idx1-ubyte"] = PIXELS[part], LABELS[part]
        table = qmnist(LABELS[part], WRITERS[part])
        files[f"qmnist-{other}-labels-idx2-int"] = np.concatenate([table, table]) if other == "test" else table
    return files


def write_mnist(folder: Path, gzipped: bool = False, **changes: np.ndarray) -> None:
    """Write the files, those named in `changes` with other content."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in {**mnist_files(), **changes}.items():
        content = idx(array)
        (folder / f"{name}{'.gz' if gzipped else ''}").write_bytes(gzip.compress(content) if gzipped else content)


def npz_arrays(shape: tuple[int, ...] = (32, 32, 3)) -> dict[str, np.ndarray]:
    """Four training and two test images with labels, one of them of an odd shape and dtype."""
    return {
        "x_train": RNG.integers(0, 256, (4, *shape), dtype=np.uint8),
        "y_train": np.array([[0], [1], [2], [9]]),
        "x_test": np.zeros((2, *shape), dtype=np.uint8),
        "y_test": np.array([3, 4], dtype=np.uint8),
    }
