"""Data sets as tensors with integer labels, standardised and checked; DATASETS has them by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from maecho.errors import InputError
from maecho.lab.data.batching import Batches, batches
from maecho.lab.data.colour import cifar10, cifar100
from maecho.lab.data.dataset import Dataset
from maecho.lab.data.domains import pacs
from maecho.lab.data.handwritten import digits, mnist, usps
from maecho.lab.data.hub import from_hub
from maecho.lab.data.layouts import LAYOUTS
from maecho.lab.data.weights import backbone

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DATASETS",
    "Batches",
    "Dataset",
    "backbone",
    "batches",
    "cifar10",
    "cifar100",
    "digits",
    "from_hub",
    "load",
    "mnist",
    "pacs",
    "usps",
]

DATASETS: dict[str, Callable[[], Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "mnist-writers": partial(mnist, writers=True),
    "usps": usps,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "pacs": pacs,
    **{f"hub:{name}": partial(from_hub, name) for name in LAYOUTS},
}
"""Name -> what loads it from its default place. `digits` comes with scikit-learn, `hub:` through Hugging Face
`datasets`, the others lie in the folder that MAECHO_DATA names."""


def load(name: str) -> Dataset:
    """The data set of that name, from its default place."""
    if name not in DATASETS:
        raise InputError(f"load: no data set {name!r}, known are {', '.join(DATASETS)}")
    return DATASETS[name]()
