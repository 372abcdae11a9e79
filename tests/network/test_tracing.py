"""The spaces that tracing finds in a network, and the axes that it leaves alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from maecho import InputError
from maecho.lab.networks import mlp
from maecho.network.spaces import verify
from maecho.network.tracing import derive
from support.clients import rng
from support.networks import ResNet, cnn, with_running_statistics


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=5), st.booleans(), st.integers(0, 1000))
def test_random_mlps(sizes: list[int], bias: bool, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = mlp(sizes, bias=bias)
    x = torch.randn(3, sizes[0], generator=rng(seed))
    spaces = derive(model, x)
    assert [space.size for space in spaces] == sizes[1:-1]
    verify(model, spaces, x, tolerance=1e-3)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_random_cnns(channels: list[int], norm: bool, bias: bool, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in zip([2, *channels], channels, strict=False):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias),
                *[nn.BatchNorm2d(outputs)] * norm,
                nn.ReLU(),
            ]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * 16, 4), nn.ReLU(), nn.Linear(4, 3))
    x = torch.randn(4, 2, 4, 4, generator=rng(seed))
    spaces = derive(with_running_statistics(model, x), x)
    assert len(spaces) == len(channels) + 1
    verify(model, spaces, x)


def test_a_residual_sum_makes_one_space_of_both_sides() -> None:
    spaces = {space.name: space for space in derive(ResNet(), torch.randn(2, 3, 8, 8))}
    assert {p.tensor for p in spaces["stem"].places} >= {"stem.weight", "blocks.0.two.weight", "blocks.1.one.weight"}


def test_flattened_maps_give_blocks() -> None:
    places = {(p.tensor, p.axis): p.block for space in derive(cnn(), torch.randn(2, 3, 8, 8)) for p in space.places}
    assert places["11.weight", 1] == 4


def test_what_is_not_understood_is_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.cumsum(self.one(x), 1))

    assert derive(Odd(), torch.randn(3, 6)) == ()


def test_a_network_that_cannot_be_traced_says_what_to_do() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InputError, match=r"Branching must be traceable by torch\.fx .*got: .*give them by hand"):
        derive(Branching(), torch.randn(3, 6))
