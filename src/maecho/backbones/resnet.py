"""ResNet-18 and ResNet-34 (He et al., 2016) from torchvision, without their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maecho.errors import InputError

if TYPE_CHECKING:
    from torch import nn


def resnet(depth: int) -> nn.Module:
    """Make torchvision's ResNet of this depth, 18 or 34, with its head of 1,000 classes."""
    try:
        from torchvision import models  # the only place that needs it
    except ImportError as error:
        raise InputError(f"resnet-{depth} needs torchvision, got none; pip install 'maecho[resnets]'") from error
    except RuntimeError as error:  # torchvision's compiled part does not fit this torch
        raise InputError(f"resnet-{depth} needs a torchvision built for this torch, got {error}") from error
    return {18: models.resnet18, 34: models.resnet34}[depth](weights=None)  # type: ignore[no-any-return]
