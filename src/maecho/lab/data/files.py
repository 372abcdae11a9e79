"""Reads the file formats of data sets: idx (MNIST's own) and npz. A file that is damaged is refused."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from maecho.errors import InputError
from maecho.lab.data.known import check

if TYPE_CHECKING:
    from pathlib import Path

_CODES = {"u1": 0x08, "i4": 0x0C}
"""numpy's name of a dtype -> the third byte of an idx file. Numbers are big-endian."""


def read_idx(path: Path, ndim: int, dtype: str = "u1") -> np.ndarray:
    """Read an idx file: the bytes 0 0 (dtype) (ndim), then one big-endian 32-bit length for each dimension, then the
    values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path}: not a whole gzip file ({error})") from error
    magic, header = bytes([0, 0, _CODES[dtype], ndim]), 4 + 4 * ndim
    if raw[:4] != magic:
        what = {"u1": "bytes", "i4": "32-bit numbers"}[dtype]
        raise InputError(
            f"{path}: an idx file of {what} with {ndim} axes starts with {magic.hex()}, got "
            f"{raw[:4].hex() or 'nothing'}"
        )
    if len(raw) < header:
        raise InputError(f"{path}: truncated, a header of {header} bytes is expected, got {len(raw)}")
    shape = tuple(int(length) for length in np.frombuffer(raw, dtype=">u4", count=ndim, offset=4))
    size = header + prod(shape) * np.dtype(dtype).itemsize
    if len(raw) != size:
        raise InputError(f"{path}: shape {shape} needs {size} bytes, got {len(raw)}")
    # A copy, since torch asks for memory that may be written to, and in its own byte order.
    return np.frombuffer(raw, dtype=f">{dtype}", offset=header).reshape(shape).astype(dtype)


def read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read these arrays of an .npz file. Pickled objects are refused."""
    try:
        # Opened here, since numpy leaves a file open that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in keys if key in archive}
    except (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: not a readable .npz file ({error})") from error
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise InputError(f"{path}: must hold {', '.join(keys)}, lacks {', '.join(missing)}")
    return arrays


def images_and_labels(
    name: str, path: Path, shape: tuple[int, ...], classes: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(images, labels) for training and for the test, of an .npz file with x_train, y_train, x_test, y_test.

    Images are uint8 [n, *shape] and labels come back as uint8 [n], whatever whole numbers the file has. Both are held
    against what is known of the data set.
    """
    arrays = read_npz(path, ("x_train", "y_train", "x_test", "y_test"))
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or x.shape[1:] != shape:
            sizes = ", ".join(map(str, ("n", *shape)))
            raise InputError(f"{path}: x_{part} must be uint8 [{sizes}], got {x.dtype} {list(x.shape)}")
        if y.dtype.kind not in "iu" or y.size != len(x):
            raise InputError(f"{path}: y_{part} must be {len(x)} whole numbers, got {y.dtype} {list(y.shape)}")
        if y.size and (y.min() < 0 or y.max() >= classes):
            raise InputError(f"{path}: y_{part} must lie in 0..{classes - 1}, got {y.min()}..{y.max()}")
        arrays[f"x_{part}"], arrays[f"y_{part}"] = np.ascontiguousarray(x), y.reshape(-1).astype(np.uint8)
        for key in (f"x_{part}", f"y_{part}"):
            check(name, key, path, arrays[key])
    return (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])
