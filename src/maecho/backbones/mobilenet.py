"""MobileNetV2 (Sandler et al., 2018, arXiv:1801.04381), from Table 2 of its paper.

Parameters have the names of the published ImageNet weights, mobilenet_v2-b0353104.pth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float

BOTTLENECKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""The rows of Table 2: the expansion t, the channels c, the number of blocks n, the stride s of the first block."""
FIRST, LAST, CLASSES = 32, 1280, 1000


class MobileNetV2(nn.Module):
    """Turns RGB images into scores of ImageNet's 1,000 classes. `embed` gives the 1,280 features before them."""

    def __init__(self) -> None:
        super().__init__()
        stages, inputs = [_convolution(3, FIRST, 3, stride=2)], FIRST
        for expansion, outputs, repeats, stride in BOTTLENECKS:
            for k in range(repeats):
                stages.append(Bottleneck(inputs, outputs, stride if k == 0 else 1, expansion))
                inputs = outputs
        self.features = nn.Sequential(*stages, _convolution(inputs, LAST, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(LAST, CLASSES))

    def embed(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        """The mean over the places of the last feature map."""
        return self.features(x).mean((2, 3))  # type: ignore[no-any-return]

    def forward(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1000"]:
        return self.classifier(self.embed(x))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """The block of Table 1: expand the channels, convolve each channel alone, project linearly. The input is added if
    the shapes are equal."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([_convolution(inputs, inner, 1)] if expansion > 1 else []),
            _convolution(inner, inner, 3, stride, groups=inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.adds else y


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution that keeps the size (apart from the stride), BatchNorm and ReLU6."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())
