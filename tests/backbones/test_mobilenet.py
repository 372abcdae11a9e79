"""MobileNetV2 is the paper's: its sizes, its names, and with the published weights what it sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maecho.backbones import MobileNetV2
from maecho.randomness import global_seed


@pytest.fixture(scope="module")
def network() -> MobileNetV2:
    with global_seed(0):
        return MobileNetV2().eval()


def test_it_has_the_published_number_of_parameters(network: MobileNetV2) -> None:
    assert sum(parameter.numel() for parameter in network.parameters()) == 3_504_872


def test_names_and_shapes_are_those_of_the_published_weights(network: MobileNetV2) -> None:
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert len(shapes) == 314
    assert shapes["features.0.0.weight"] == (32, 3, 3, 3)
    assert shapes["features.1.conv.0.0.weight"] == (32, 1, 3, 3)
    assert shapes["features.1.conv.1.weight"] == (16, 32, 1, 1)
    assert shapes["features.2.conv.0.0.weight"] == (96, 16, 1, 1)
    assert shapes["features.17.conv.3.running_var"] == (320,)
    assert shapes["features.18.1.num_batches_tracked"] == ()
    assert shapes["classifier.1.bias"] == (1000,)


def test_maps_shrink_as_in_table_2(network: MobileNetV2) -> None:
    seen: list[tuple[int, ...]] = []
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for stage in network.features:
            x = stage(x)
            seen.append(tuple(x.shape[1:]))
    assert [seen[k] for k in (0, 1, 3, 6, 10, 13, 16, 17, 18)] == [
        (32, 32, 32),
        (16, 32, 32),
        (24, 16, 16),
        (32, 8, 8),
        (64, 4, 4),
        (96, 4, 4),
        (160, 2, 2),
        (320, 2, 2),
        (1280, 2, 2),
    ]


def test_ten_blocks_add_their_input(network: MobileNetV2) -> None:
    """17 bottlenecks, 7 of which begin a stage."""
    adds = [k for k, stage in enumerate(network.features) if getattr(stage, "adds", False)]
    assert adds == [3, 5, 6, 8, 9, 10, 12, 13, 15, 16]
    block = network.features[3]
    x = torch.rand(2, 24, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(block(x), x + block.conv(x))


def test_the_projection_is_linear_and_the_rest_is_cut_at_six(network: MobileNetV2) -> None:
    kinds = [type(module) for module in network.modules()]
    assert kinds.count(nn.ReLU6) == 35  # the first and last convolution, 17 depthwise, 16 expansions
    assert nn.ReLU not in kinds
    assert isinstance(network.features[5].conv[-1], nn.BatchNorm2d)


def test_scores_come_from_the_embedding(network: MobileNetV2) -> None:
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert network.embed(x).shape == (2, 1280)
        assert torch.equal(network(x), network.classifier(network.embed(x)))
        assert network(x).shape == (2, 1000)
