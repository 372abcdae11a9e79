"""Loads pretrained backbones by name, with weights from the data folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maecho.backbones import BACKBONES, Backbone
from maecho.backbones import load as load_backbone
from maecho.errors import InputError
from maecho.lab.data.places import find

if TYPE_CHECKING:
    from pathlib import Path


def backbone(name: str, folder: Path | None = None, *, side: int | None = 224, head: bool = False) -> Backbone:
    """Load a backbone of BACKBONES with the weights in `folder`/weights or `folder`; see `maecho.backbones.load`."""
    if name not in BACKBONES:
        raise InputError(f"backbone: no {name!r}, known are {', '.join(BACKBONES)}")
    file = BACKBONES[name].file
    path = find("weights", folder, file, f"download.pytorch.org/models/{file}")
    return load_backbone(name, path, side=side, head=head)
