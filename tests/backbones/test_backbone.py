"""Feature extraction: what goes in, that nothing moves, and that batches do not matter."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from maecho.backbones import Backbone, MobileNetV2, features
from maecho.backbones.backbone import MEAN, STD
from maecho.errors import InputError
from maecho.randomness import global_seed


def images(n: int = 5, channels: int = 3, side: int = 20) -> torch.Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(0))


class Flat(nn.Module):
    """Shows what reaches the network."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


@pytest.fixture
def mobilenet() -> Backbone:
    with global_seed(0):
        network = MobileNetV2()
    network.classifier = nn.Identity()  # type: ignore[assignment]
    return Backbone(network, side=32)


def test_features_have_the_width_and_repeat(mobilenet: Backbone) -> None:
    found = features(mobilenet, images())
    assert found.shape == (5, 1280)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert torch.equal(found, features(mobilenet, images()))
    torch.testing.assert_close(found, features(mobilenet, images(), batch_size=2), atol=1e-5, rtol=1e-4)


def test_pixels_are_standardised_as_imagenet() -> None:
    x = images()
    expected = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(features(Backbone(Flat(), side=None), x), expected.flatten(1))


def test_bytes_and_grey_images(mobilenet: Backbone) -> None:
    grey = (255 * images(channels=1)).to(torch.uint8)
    expected = features(mobilenet, (grey.float() / 255).expand(-1, 3, -1, -1))
    assert torch.equal(features(mobilenet, grey), expected)


def test_other_images_come_with_their_way_back(mobilenet: Backbone) -> None:
    x = images()
    assert torch.equal(features(mobilenet, x), features(mobilenet, x * 8, pixels=lambda batch: batch / 8))


@pytest.mark.parametrize(("side", "new"), [(12, 6), (12, 24)])
def test_resizing_keeps_means_and_does_not_alias(side: int, new: int) -> None:
    """A checkerboard is grey when it is halved; flat images stay flat."""
    squares = torch.arange(side).view(-1, 1) + torch.arange(side)
    board = (squares % 2).float().expand(1, 3, side, side)
    flat = torch.full((1, 3, side, side), 0.25)
    back = torch.tensor(STD).view(3, 1, 1), torch.tensor(MEAN).view(3, 1, 1)
    resized = [features(Backbone(Flat(), side=new), x).view(3, new, new) * back[0] + back[1] for x in (board, flat)]
    torch.testing.assert_close(resized[1], torch.full((3, new, new), 0.25))
    assert resized[0].mean().item() == pytest.approx(0.5, abs=1e-5)
    if new < side:
        assert (resized[0] - 0.5).abs().max() < 0.3


def test_a_backbone_never_trains(mobilenet: Backbone) -> None:
    before = {name: value.clone() for name, value in mobilenet.state_dict().items()}
    mobilenet.train()
    assert not any(module.training for module in mobilenet.modules())
    assert not any(parameter.requires_grad for parameter in mobilenet.parameters())
    x = images().requires_grad_()
    assert not mobilenet(x).requires_grad
    assert all(torch.equal(value, before[name]) for name, value in mobilenet.state_dict().items())


def test_the_digest_is_that_of_weights_and_side(mobilenet: Backbone) -> None:
    assert Backbone(mobilenet.network, side=32).digest == mobilenet.digest
    assert Backbone(mobilenet.network, side=64).digest != mobilenet.digest
    first = next(iter(mobilenet.network.state_dict().values()))
    first.view(-1)[0] += 1
    assert Backbone(mobilenet.network, side=32).digest != mobilenet.digest


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(2, 3, 4), "features: images must be [n, 1 or 3, height, width], got [2, 3, 4]"),
        (torch.rand(2, 2, 4, 4), "features: images must be [n, 1 or 3, height, width], got [2, 2, 4, 4]"),
        (torch.rand(0, 3, 4, 4), "features: images must be [n, 1 or 3, height, width], got [0, 3, 4, 4]"),
        (
            torch.linspace(-2, 2, 48).view(1, 3, 4, 4),
            "features: images must lie in [0, 1], got -2 to 2; pixels= undoes a standardisation",
        ),
        (torch.full((1, 3, 4, 4), torch.nan), "features: images must lie in [0, 1], got nan to nan"),
    ],
)
def test_images_that_do_not_fit(x: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        features(Backbone(Flat()), x)


def test_bad_options() -> None:
    with pytest.raises(InputError, match="features: batch_size must be at least 1, got 0"):
        features(Backbone(Flat()), images(), batch_size=0)
    with pytest.raises(InputError, match="backbone: side must be at least 1, got 0"):
        Backbone(Flat(), side=0)
