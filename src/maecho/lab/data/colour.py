"""Small colour photographs from files: CIFAR-10 and CIFAR-100."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maecho.lab.data.dataset import Dataset
from maecho.lab.data.files import images_and_labels
from maecho.lab.data.places import find
from maecho.lab.data.scaling import CIFAR10, CIFAR100, Scale

if TYPE_CHECKING:
    from pathlib import Path

_SOURCE = (
    "www.cs.toronto.edu/~kriz/cifar.html, its arrays saved as uint8 with channels last, or load 'hub:{name}' through "
    "Hugging Face datasets (pip install 'maecho[hub]')"
)


def cifar10(folder: Path | None = None) -> Dataset:
    """CIFAR-10 from cifar10.npz (x_train, y_train, x_test, y_test; uint8 images, channels last)."""
    return _cifar("cifar10", 10, folder, CIFAR10)


def cifar100(folder: Path | None = None) -> Dataset:
    """CIFAR-100 with its 100 fine labels from cifar100.npz, laid out as CIFAR-10 is."""
    return _cifar("cifar100", 100, folder, CIFAR100)


def _cifar(name: str, classes: int, folder: Path | None, scale: Scale) -> Dataset:
    path = find(name, folder, f"{name}.npz", _SOURCE.format(name=name))
    (x, y), (x_test, y_test) = images_and_labels(name, path, (32, 32, 3), classes)
    return Dataset(
        name,
        scale.standardised(x),
        torch.from_numpy(y).long(),
        scale.standardised(x_test),
        torch.from_numpy(y_test).long(),
        classes=classes,
        mean=scale.mean,
        std=scale.std,
    )
