"""Turns bytes into standardised inputs. The operations are always the same, so that digests agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of the pixels of each channel, on the scale from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardised(self, pixels: np.ndarray) -> Float[Tensor, "n channels h w"]:
        """Compute (pixels / 255 - mean) / std for uint8 [n, h, w] or [n, h, w, channels]."""
        found = torch.from_numpy(pixels)
        found = found.unsqueeze(1) if found.ndim == 3 else found.permute(0, 3, 1, 2).contiguous()
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        return found.float().div_(255).sub_(mean).div_(std)


def _of_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> Scale:
    """Make a Scale from numbers between 0 and 255. The division is in float32, which keeps the last digit of published
    results."""
    mean, std = (tuple((torch.tensor(each) / 255).tolist()) for each in (mean, std))
    return Scale(mean, std)


MNIST = Scale((0.1307,), (0.3081,))
USPS = Scale((0.2545,), (0.3846,))
CIFAR10 = _of_bytes((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
CIFAR100 = _of_bytes((129.3, 124.1, 112.4), (68.2, 65.4, 70.4))
IMAGENET = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
