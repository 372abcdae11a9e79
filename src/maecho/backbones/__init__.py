"""Frozen networks that turn images into features: BACKBONES has the pretrained ones by name."""

from __future__ import annotations

from maecho.backbones.backbone import Backbone, features
from maecho.backbones.mobilenet import MobileNetV2
from maecho.backbones.pretrained import BACKBONES, Pretrained, load

__all__ = ["BACKBONES", "Backbone", "MobileNetV2", "Pretrained", "features", "load"]
