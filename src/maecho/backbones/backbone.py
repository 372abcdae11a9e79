"""A backbone: a frozen network between images and features. Nothing about it ever changes."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from maecho.devices import Device, find
from maecho.errors import InputError
from maecho.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Shaped

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The mean and standard deviation of ImageNet's pixels. The pretrained weights expect inputs that were standardised
with them."""
_ROUNDING = 1e-3


class Backbone(nn.Module):
    """Computes features of images with values in [0, 1]. It always runs in eval mode and without gradients.

    Args:
        network: turns standardised RGB images [n, 3, side, side] into features [n, width].
        side: every image is first resized to this height and width (bilinear, antialiased). None: images are not
            resized.
    """

    def __init__(self, network: nn.Module, side: int | None = 224) -> None:
        super().__init__()
        if side is not None and side < 1:
            raise InputError(f"backbone: side must be at least 1, got {side}")
        self.network, self.side = network, side
        self.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode, whatever the caller asks for, since running means must not change."""
        del mode
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "n channels h w"]) -> Float[Tensor, "n width"]:
        """Compute the features. A grey image gets three equal channels."""
        x = images.expand(-1, 3, -1, -1)
        if self.side is not None and x.shape[2:] != (self.side, self.side):
            x = interpolate(x, (self.side, self.side), mode="bilinear", align_corners=False, antialias=True)
        mean, std = (torch.tensor(each, dtype=x.dtype, device=x.device).view(3, 1, 1) for each in (MEAN, STD))
        return self.network((x - mean) / std)  # type: ignore[no-any-return]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights, their names and the side. Features depend on nothing else, so a cache can use it as a
        key."""
        found = hashlib.sha256(repr((type(self.network).__name__, self.side)).encode())
        for name, tensor in self.network.state_dict().items():
            found.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
            found.update(tensor.detach().cpu().contiguous().numpy().data)
        return found.hexdigest()


def features(
    backbone: Backbone,
    images: Shaped[Tensor, "n channels h w"],
    *,
    batch_size: int = 64,
    device: Device = "cpu",
    pixels: Callable[[Tensor], Tensor] | None = None,
    progress: bool | None = None,
) -> Float[Tensor, "n width"]:
    """Compute a backbone's features of images, as float32 on the CPU.

    Args:
        images: grey or RGB images, uint8 or numbers in [0, 1].
        device: where the backbone runs. It is moved there.
        pixels: turns a batch of other images into numbers in [0, 1], e.g. `Dataset.pixels`.
        progress: True or False for a bar or none. None shows a bar only on a terminal.
    """
    if images.ndim != 4 or images.shape[1] not in {1, 3} or not len(images):
        raise InputError(f"features: images must be [n, 1 or 3, height, width], got {list(images.shape)}")
    if batch_size < 1:
        raise InputError(f"features: batch_size must be at least 1, got {batch_size}")
    place = find(device, torch.float32)
    backbone = backbone.to(place)
    parts = track(torch.split(images, batch_size), "features", show=progress)
    return torch.cat([backbone(_in_range(part.to(place), pixels)).float().cpu() for part in parts])


def _in_range(batch: Tensor, pixels: Callable[[Tensor], Tensor] | None) -> Tensor:
    """The images as float32 in [0, 1]."""
    batch = pixels(batch) if pixels is not None else batch
    batch = batch.float() / 255 if batch.dtype == torch.uint8 else batch.float()
    low, high = batch.min().item(), batch.max().item()
    if not (-_ROUNDING <= low <= high <= 1 + _ROUNDING):  # NaN fails too
        raise InputError(
            f"features: images must lie in [0, 1], got {low:.4g} to {high:.4g}; pixels= undoes a standardisation"
        )
    return batch
