"""Networks: they have the paper's shapes, and their weights depend only on the generator."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from maecho.lab.networks import NETWORKS, build, mlp

SHAPES = {
    "mlp": {
        "fc1.weight": (400, 784),
        "fc2.weight": (200, 400),
        "fc3.weight": (100, 200),
        "fc4.weight": (10, 100),
    },
    "cnn": {
        "c1.weight": (64, 3, 3, 3),
        "c2.weight": (128, 64, 3, 3),
        "c3.weight": (256, 128, 3, 3),
        "fc1.weight": (1000, 4096),
        "fc2.weight": (500, 1000),
        "fc3.weight": (10, 500),
    },
    "cifar100-head": {"fc1.weight": (512, 1280), "fc2.weight": (100, 512)},
    "cifar100-linear": {"fc1.weight": (100, 1280)},
    "pacs-head": {"fc1.weight": (512, 1280), "fc2.weight": (7, 512)},
    "pacs-linear": {"fc1.weight": (7, 1280)},
    "digits-mlp": {"fc1.weight": (100, 64), "fc2.weight": (50, 100), "fc3.weight": (10, 50)},
    "digits-linear": {"fc1.weight": (10, 64)},
}
INPUTS = {"mlp": (1, 28, 28), "cnn": (3, 32, 32), "digits-mlp": (1, 8, 8), "digits-linear": (1, 8, 8)}
FEATURES = (1280,)
"""The inputs of all others."""


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_have_the_papers_shapes_and_images_go_through(name: str, rng: torch.Generator) -> None:
    model = build(name, rng)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == SHAPES[name]
    classes = list(SHAPES[name].values())[-1][0]
    assert model(torch.zeros(2, *INPUTS.get(name, FEATURES))).shape == (2, classes)


def test_mlp_is_matrices_with_relu_between(rng: torch.Generator) -> None:
    model = build("mlp", rng)
    x = torch.randn(3, 1, 28, 28, generator=rng)
    expected = x.flatten(1)
    for k in range(1, 5):
        expected = expected @ model.get_parameter(f"fc{k}.weight").T
        expected = expected.relu() if k < 4 else expected
    torch.testing.assert_close(model(x), expected)


def test_cnn_convolves_then_relu_then_dropout_then_pool(rng: torch.Generator) -> None:
    model = build("cnn", rng)
    kinds = [type(layer) for layer in model.children()]
    fc = [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert kinds == 3 * [nn.Conv2d, nn.ReLU, nn.Dropout, nn.MaxPool2d] + fc
    assert {layer.p for layer in model.children() if isinstance(layer, nn.Dropout)} == {0.2}


def test_cnn_linear_weights_are_xavier_normal(rng: torch.Generator) -> None:
    weight = build("cnn", rng).get_parameter("fc1.weight")
    std = (2 / (4096 + 1000)) ** 0.5
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    # A uniform of that spread would end at 1.7 standard deviations.
    assert weight.abs().max() > 4 * std


def test_mlp_takes_widths_and_biases() -> None:
    assert {k: tuple(v.shape) for k, v in mlp((4, 3, 2), bias=True).state_dict().items()} == {
        "fc1.weight": (3, 4),
        "fc1.bias": (3,),
        "fc2.weight": (2, 3),
        "fc2.bias": (2,),
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_the_generator_decides_the_weights_and_nothing_else_moves(name: str) -> None:
    before = torch.random.get_rng_state()
    a, b, c = (list(build(name, torch.Generator().manual_seed(s)).parameters()) for s in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(a, c, strict=True))


def test_one_generator_gives_a_new_network_each_time(rng: torch.Generator) -> None:
    a, b = build("digits-mlp", rng), build("digits-mlp", rng)
    assert not torch.equal(a.get_parameter("fc1.weight"), b.get_parameter("fc1.weight"))


def test_messages(rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match="build: no network 'vgg', known are mlp, cnn, "):
        build("vgg", rng)
    for sizes in ((784,), (784, 0, 10)):
        message = f"mlp: sizes must be two or more positive widths, got {sizes}"
        with pytest.raises(ValueError, match=re.escape(message)):
            mlp(sizes)
