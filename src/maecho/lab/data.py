"""Data sets as tensors: images [n, channels, height, width], standardised, with integer labels.

`digits` comes with scikit-learn; the others are read from the folder that MAECHO_DATA names. Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zipfile
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Float, Int, UInt8


@dataclass(frozen=True, eq=False)
class Dataset:
    """Float32 inputs and int64 labels 0..classes-1, for training and for the test."""

    name: str
    x_train: Float[Tensor, "train ..."] = field(repr=False)
    y_train: Int[Tensor, " train"] = field(repr=False)
    x_test: Float[Tensor, "test ..."] = field(repr=False)
    y_test: Int[Tensor, " test"] = field(repr=False)
    classes: int

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if x.dtype != torch.float32 or y.dtype != torch.int64:
                raise ValueError(
                    f"{self.name}: {part} inputs must be float32 and labels int64, got {x.dtype} and {y.dtype}"
                )
            if y.ndim != 1 or len(x) != len(y) or not len(y):
                raise ValueError(
                    f"{self.name}: {part} needs one label an input, got inputs {tuple(x.shape)} and labels "
                    f"{tuple(y.shape)}"
                )
            if y.min() < 0 or y.max() >= self.classes:
                raise ValueError(
                    f"{self.name}: {part} labels must lie in 0..{self.classes - 1}, got {int(y.min())}..{int(y.max())}"
                )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"{self.name}: train and test inputs must have one shape, got {tuple(self.x_train.shape[1:])} and "
                f"{tuple(self.x_test.shape[1:])}"
            )

    @cached_property
    def digest(self) -> str:
        """Changes with any value of any example or label."""
        found = hashlib.sha256(f"{self.name} {self.classes}".encode())
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            found.update(f" {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.contiguous().numpy().data)
        return found.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Batches:
    """(inputs, labels) in batches, as often as one likes; see `batches`."""

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    size: int
    rng: torch.Generator | None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"batches: size must be at least 1, got {self.size}")
        if len(self.x) != len(self.y):
            raise ValueError(f"batches: one label an input, got {len(self.x)} inputs and {len(self.y)} labels")

    def __len__(self) -> int:
        return -(-len(self.y) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.rng is None:
            yield from zip(torch.split(self.x, self.size), torch.split(self.y, self.size), strict=True)
            return
        order = torch.randperm(len(self.y), generator=self.rng).to(self.y.device)
        for rows in torch.split(order, self.size):
            yield self.x[rows], self.y[rows]


def batches(x: Tensor, y: Tensor, size: int = 64, rng: torch.Generator | None = None) -> Batches:
    """Batches that can be passed over again; with `rng` (on the CPU) every pass has a new order."""
    return Batches(x, y, size, rng)


def digits() -> Dataset:
    """Scikit-learn's 1,797 handwritten digits, 8x8: every fourth of each class is a test example."""
    from sklearn.datasets import load_digits  # the only place that needs it

    bunch = load_digits()
    labels = np.asarray(bunch.target, dtype=np.int64)
    by_class = np.argsort(labels, kind="stable")
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[by_class[::4]] = True
    x = torch.from_numpy(np.asarray(bunch.images, dtype=np.float32) / 16).unsqueeze(1)
    y, test = torch.from_numpy(labels), torch.from_numpy(is_test)
    x = (x - x[~test].mean()) / x[~test].std()
    return Dataset("digits", x[~test], y[~test], x[test], y[test], classes=10)


def mnist(folder: Path | None = None) -> Dataset:
    """MNIST from its four idx files, gzipped or not, in `folder`/mnist or `folder`."""

    def read(part: str) -> tuple[Tensor, Tensor]:
        pixels = _read_idx(_find("mnist", folder, f"{part}-images-idx3-ubyte"), ndim=3)
        labels = _read_idx(_find("mnist", folder, f"{part}-labels-idx1-ubyte"), ndim=1)
        x = torch.from_numpy(pixels).unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)
        return x, torch.from_numpy(labels).long()

    return Dataset("mnist", *read("train"), *read("t10k"), classes=10)


def cifar10(folder: Path | None = None) -> Dataset:
    """CIFAR-10 from cifar10.npz (x_train, y_train, x_test, y_test; uint8 images, channels last)."""
    arrays = _read_npz(_find("cifar10", folder, "cifar10.npz"), ("x_train", "y_train", "x_test", "y_test"))
    mean = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1) / 255
    std = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1) / 255

    def images(key: str) -> Tensor:
        pixels = arrays[key]
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (32, 32, 3):
            raise ValueError(f"cifar10: {key} must be uint8 [n, 32, 32, 3], got {pixels.dtype} {list(pixels.shape)}")
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float()
        return x.div_(255).sub_(mean).div_(std)

    def labels(key: str) -> Tensor:
        return torch.from_numpy(arrays[key].astype(np.int64)).flatten()

    return Dataset("cifar10", images("x_train"), labels("y_train"), images("x_test"), labels("y_test"), classes=10)


DATASETS: dict[str, Callable[[], Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
}


def load(name: str) -> Dataset:
    """The data set of that name, from its default place."""
    if name not in DATASETS:
        raise ValueError(f"load: no data set {name!r}, known are {', '.join(DATASETS)}")
    return DATASETS[name]()


def _find(name: str, folder: Path | None, file: str) -> Path:
    """The file, or its gzipped form, in `folder`/`name` or `folder`."""
    if folder is None:
        folder = Path(os.environ.get("MAECHO_DATA") or Path.home() / ".cache" / "maecho" / "data")
    candidates = [place / f"{file}{suffix}" for place in (folder / name, folder) for suffix in (".gz", "")]
    for path in candidates:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{name}: {folder} has no {file} or {file}.gz, neither there nor in its folder {name}; "
        "set MAECHO_DATA to the folder that holds the data"
    )


def _read_idx(path: Path, ndim: int) -> UInt8[np.ndarray, "..."]:
    """An idx file of bytes: magic 0 0 8 ndim, then one big-endian 32-bit length a dimension, then the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error})") from error
    magic, header = bytes([0, 0, 8, ndim]), 4 + 4 * ndim
    if raw[:4] != magic:
        raise ValueError(
            f"{path}: an idx file of bytes with {ndim} axes starts with {magic.hex()}, got {raw[:4].hex()}"
        )
    if len(raw) < header:
        raise ValueError(f"{path}: truncated, a header of {header} bytes is expected, got {len(raw)}")
    shape = tuple(int(length) for length in np.frombuffer(raw, dtype=">u4", count=ndim, offset=4))
    if len(raw) != header + prod(shape):
        raise ValueError(f"{path}: shape {shape} needs {header + prod(shape)} bytes, got {len(raw)}")
    # A copy, since torch asks for memory that may be written to.
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape).copy()


def _read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in keys if key in archive}
    except (EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a readable .npz file ({error})") from error
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(f"{path}: must hold {', '.join(keys)}, lacks {', '.join(missing)}")
    return arrays
