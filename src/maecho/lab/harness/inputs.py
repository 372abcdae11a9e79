"""The data set of an experiment: as it is, or as the features of a frozen backbone.

Features are kept in a cache, under a hash of the images, of the backbone's weights and of the code that computes them.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from maecho import disk
from maecho.backbones import Backbone
from maecho.backbones import features as compute
from maecho.errors import InputError
from maecho.lab import data
from maecho.lab.experiment import Experiment
from maecho.lab.harness.cache import cache_folder, digest
from maecho.lab.harness.code import Code
from maecho.upload import storage

PARTS = ("train", "test")


def load(experiment: Experiment, device: str = "cpu") -> data.Dataset:
    """The inputs and labels that the experiment's clients and its test have."""
    images = data.load(experiment.data)
    if experiment.features is None:
        return images
    wanted = experiment.features
    return of_backbone(images, data.backbone(wanted.backbone, side=wanted.side), device)


def of_backbone(images: data.Dataset, backbone: Backbone, device: str = "cpu") -> data.Dataset:
    """The data set with the backbone's features in the place of its images. Labels and origins stay."""
    if images.x_train.ndim != 4:
        raise InputError(
            f"features: {images.name} must have images [channels, height, width], got {list(images.x_train.shape[1:])}"
        )
    identity = digest(images.digest, backbone.digest, Code.of(Backbone, compute).digest)
    path = cache_folder() / "features" / f"{identity}.safetensors"
    with disk.locked(path):  # of two runs at once only one computes them
        found = {}
        if path.exists():
            with contextlib.suppress(InputError):  # a damaged file is replaced
                storage.read_about(path, "features")
                found = storage.read_tensors(path)
        if found.keys() != set(PARTS):
            found = {
                part: compute(backbone, x, device=device, pixels=images.pixels)
                for part, x in zip(PARTS, (images.x_train, images.x_test), strict=True)
            }
            storage.write_tensors(path, "features", found, {"data": images.name, "backbone": backbone.digest})
    return replace(
        images, x_train=found["train"], x_test=found["test"], mean=(0.0,), std=(1.0,), computed_from=identity
    )
