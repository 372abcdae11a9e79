"""Handwritten digits: scikit-learn's, which need no file, MNIST (on request with its writers), and USPS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from maecho.errors import InputError
from maecho.lab.data.dataset import Dataset
from maecho.lab.data.files import images_and_labels, read_idx
from maecho.lab.data.known import check
from maecho.lab.data.places import find
from maecho.lab.data.scaling import MNIST, USPS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_MNIST_SOURCE = (
    "a copy of yann.lecun.com/exdb/mnist (four idx files), or load 'hub:mnist' through Hugging Face datasets "
    "(pip install 'maecho[hub]')"
)
_QMNIST_SOURCE = "github.com/facebookresearch/qmnist"
_USPS_SOURCE = "the libsvm data sets (usps, usps.t), as uint8 arrays x_train, y_train, x_test, y_test"
_CLASS, _WRITER = 0, 2
"""The columns of QMNIST's labels that are read. The eight columns are: digit, partition of NIST, writer, index of the
digit among those of that writer, class in NIST, position in NIST, duplicate, unused."""


def digits() -> Dataset:
    """Scikit-learn's 1,797 handwritten digits, 8x8: every fourth of each class is a test example."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    labels = np.asarray(bunch.target, dtype=np.int64)
    by_class = np.argsort(labels, kind="stable")
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[by_class[::4]] = True
    x = torch.from_numpy(np.asarray(bunch.images, dtype=np.float32) / 16).unsqueeze(1)
    y, test = torch.from_numpy(labels), torch.from_numpy(is_test)
    mean, std = x[~test].mean(), x[~test].std()
    x = (x - mean) / std
    return Dataset("digits", x[~test], y[~test], x[test], y[test], classes=10, mean=(mean.item(),), std=(std.item(),))


def mnist(folder: Path | None = None, writers: bool = False) -> Dataset:
    """MNIST from its four idx files, gzipped or not, in `folder`/mnist or `folder`.

    Args:
        writers: whether the writers of the digits are the groups. They are read from QMNIST's two label files, and the
            data set is called "mnist-writers". No writer has digits both for training and for the test.
    """
    images, labels, authors = [], [], []
    for part, qmnist in (("train", "train"), ("t10k", "test")):
        pixels = _read(folder, f"{part}-images-idx3-ubyte", 3)
        digits = _read(folder, f"{part}-labels-idx1-ubyte", 1)
        images.append(MNIST.standardised(pixels))
        labels.append(torch.from_numpy(digits).long())
        if writers:
            authors.append(_writers(folder, f"qmnist-{qmnist}-labels-idx2-int", digits))
    groups: list[Tensor | None] = [None, None]
    group_names: tuple[str, ...] = ()
    if writers:
        known, positions = np.unique(np.concatenate(authors), return_inverse=True)
        group_names = tuple(str(one) for one in known)
        groups = [torch.from_numpy(each) for each in np.split(positions.astype(np.int64), [len(authors[0])])]
    return Dataset(
        "mnist-writers" if writers else "mnist",
        images[0],
        labels[0],
        images[1],
        labels[1],
        classes=10,
        groups_train=groups[0],
        groups_test=groups[1],
        group_names=group_names,
        mean=MNIST.mean,
        std=MNIST.std,
    )


def usps(folder: Path | None = None) -> Dataset:
    """USPS from usps.npz (x_train, y_train, x_test, y_test; uint8 images 16x16, as scanned and not enlarged)."""
    path = find("usps", folder, "usps.npz", _USPS_SOURCE)
    (x, y), (x_test, y_test) = images_and_labels("usps", path, (16, 16), classes=10)
    return Dataset(
        "usps",
        USPS.standardised(x),
        torch.from_numpy(y).long(),
        USPS.standardised(x_test),
        torch.from_numpy(y_test).long(),
        classes=10,
        mean=USPS.mean,
        std=USPS.std,
    )


def _read(folder: Path | None, file: str, ndim: int) -> np.ndarray:
    path = find("mnist", folder, file, _MNIST_SOURCE, (".gz", ""))
    values = read_idx(path, ndim)
    if ndim == 1 and values.size and values.max() > 9:
        raise InputError(f"{path}: labels must lie in 0..9, got {values.min()}..{values.max()}")
    check("mnist", file, path, values)
    return values


def _writers(folder: Path | None, file: str, classes: np.ndarray) -> np.ndarray:
    """The writers of these examples. They are the first ones of QMNIST."""
    path = find("mnist", folder, file, _QMNIST_SOURCE, (".gz", ""))
    table = read_idx(path, 2, "i4")
    if table.shape[1] != 8 or len(table) < len(classes):
        raise InputError(f"{path}: must have 8 columns and {len(classes)} rows or more, got {table.shape}")
    table = table[: len(classes)]
    (others,) = np.nonzero(table[:, _CLASS] != classes)
    if len(others):
        raise InputError(
            f"{path}: column {_CLASS} must be MNIST's labels, got another in {len(others)} rows, the first is row "
            f"{others[0]}"
        )
    check("mnist-writers", file, path, table)
    return table[:, _WRITER]
