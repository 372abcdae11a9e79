"""Data sets on the Hugging Face hub: where each lies, what its columns are called, and how many rows it has."""

from __future__ import annotations

from dataclasses import dataclass

from maecho.lab.data.scaling import CIFAR10, CIFAR100, IMAGENET, MNIST, Scale


@dataclass(frozen=True)
class Layout:
    """One data set of the hub.

    Args:
        rows: the number of rows of each split.
        image: the column of pictures. Those of another size than `side` are resized.
        label: the column of classes, numbered from 0.
        keep: how many classes are read, the first ones. None: all.
        group: the column that says who or what an example comes from.
        most: the most examples of one class of one group in a split, the first in the hub's order. None: all.
    """

    path: str
    rows: dict[str, int]
    image: str
    label: str
    classes: int
    side: int
    scale: Scale
    keep: int | None = None
    group: str | None = None
    most: int | None = None


def _femnist(keep: int | None = None) -> Layout:
    rows = {"train": 814_277}
    return Layout("flwrlabs/femnist", rows, "image", "character", 62, 28, MNIST, keep, group="writer_id")


_MNIST = {"train": 60_000, "test": 10_000}
_CIFAR = {"train": 50_000, "test": 10_000}
_DOMAINNET = {"train": 409_832, "test": 176_743}

LAYOUTS: dict[str, Layout] = {
    "mnist": Layout("ylecun/mnist", _MNIST, "image", "label", 10, 28, MNIST),
    "cifar10": Layout("uoft-cs/cifar10", _CIFAR, "img", "label", 10, 32, CIFAR10),
    "cifar100": Layout("uoft-cs/cifar100", _CIFAR, "img", "fine_label", 100, 32, CIFAR100),
    "femnist": _femnist(),
    "femnist-digits": _femnist(keep=10),
    "domainnet": Layout(
        "wltjr1007/DomainNet", _DOMAINNET, "image", "label", 345, 112, IMAGENET, group="domain", most=10
    ),
}
"""Name -> layout. `femnist-digits` is the subset of the paper: classes 0 to 9 are the ten digits. All of DomainNet
would be 88 GB of float32. So ten examples of every class and domain are read for training and ten for the test (6 GB).
"""
