"""The pretrained backbones: which file holds the weights of each, and how it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from maecho.backbones.backbone import Backbone
from maecho.backbones.mobilenet import MobileNetV2
from maecho.backbones.resnet import resnet
from maecho.disk import regular
from maecho.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Pretrained:
    """One published network.

    Args:
        file: the name of the file with its weights.
        sha256: the checksum of the file, or the beginning of it. Publishers put the first eight digits into the file's
            name.
        width: the number of features.
        head: the name of the module that turns features into classes.
        make: makes the network with random weights.
    """

    file: str
    sha256: str
    width: int
    head: str
    make: Callable[[], nn.Module]


BACKBONES: dict[str, Pretrained] = {
    "mobilenet-v2": Pretrained(
        "mobilenet_v2-b0353104.pth",
        "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        1280,
        "classifier",
        MobileNetV2,
    ),
    "resnet-18": Pretrained("resnet18-f37072fd.pth", "f37072fd", 512, "fc", partial(resnet, 18)),
    "resnet-34": Pretrained("resnet34-b627a593.pth", "b627a593", 512, "fc", partial(resnet, 34)),
}
"""Name -> pretrained network. All were trained on ImageNet's 1,000 classes."""


def load(name: str, path: Path, *, side: int | None = 224, head: bool = False) -> Backbone:
    """Make the backbone of this name with the weights in this file.

    Args:
        side: images are resized to this height and width.
        head: whether to give ImageNet's scores as features, instead of the features before them.
    """
    if name not in BACKBONES:
        raise InputError(f"backbone: no {name!r}, known are {', '.join(BACKBONES)}")
    row = BACKBONES[name]
    with regular(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if not found.startswith(row.sha256):
            raise InputError(
                f"{path}: weights of {name} must have the SHA-256 {row.sha256[:16]}…, got {found[:16]}…: the file is "
                "damaged or another one"
            )
        file.seek(0)
        weights = torch.load(file, map_location="cpu", weights_only=True)
    network = row.make()
    network.load_state_dict(weights, strict=True)
    if not head:
        setattr(network, row.head, nn.Identity())
    return Backbone(network, side)
