"""Permuting along the spaces leaves a network's outputs as they were; a wrong specification is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from maecho import UploadError
from maecho.lab.networks import mlp
from maecho.network.spaces import Place, Space, check, derive, load, permute, verify
from support.clients import rng
from support.networks import NETWORKS, ResNet, cnn, settled


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_unchanged(name: str) -> None:
    make, shape = NETWORKS[name]
    x = torch.randn(shape, generator=rng())
    model = settled(make(), x)
    spaces = derive(model)
    verify(model, spaces, x)
    orders = {space.name: torch.randperm(space.size, generator=rng(1)) for space in spaces}
    other = make().eval()
    other.load_state_dict(permute(model.state_dict(), spaces, orders))
    torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-5)
    assert not torch.equal(next(other.parameters()), next(model.parameters()))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=5), st.booleans(), st.integers(0, 1000))
def test_random_mlps(sizes: list[int], bias: bool, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = mlp(sizes, bias=bias)
    spaces = derive(model)
    assert [space.size for space in spaces] == sizes[1:-1]
    verify(model, spaces, torch.randn(3, sizes[0], generator=rng(seed)), tolerance=1e-3)


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
    spaces = derive(settled(model, x))
    assert len(spaces) == len(channels) + 1
    verify(model, spaces, x)


def test_a_residual_sum_makes_one_space_of_both_sides() -> None:
    spaces = {space.name: space for space in derive(ResNet())}
    assert {p.tensor for p in spaces["stem"].places} >= {"stem.weight", "blocks.0.two.weight", "blocks.1.one.weight"}


def test_flattened_maps_give_blocks() -> None:
    places = {(p.tensor, p.axis): p.block for space in derive(cnn()) for p in space.places}
    assert places["11.weight", 1] == 4


def test_what_is_not_understood_is_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.cumsum(self.one(x), 1))

    assert derive(Odd()) == ()


def test_a_network_that_cannot_be_traced_says_what_to_do() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UploadError, match=r"Branching must be traceable by torch\.fx .*got: .*give them by hand"):
        derive(Branching())


GOOD = derive(mlp((12, 9, 7, 5)))
WRONG = {
    "name": (replace(GOOD[0], places=(Place("fc9.weight", 0),)), "must be a weight of the network, got a name"),
    "size": (replace(GOOD[0], size=8), "must be 8 neurons of 1 entries, got 9"),
    "axis": (replace(GOOD[0], places=(Place("fc1.weight", 2),)), "got no such axis"),
    "block": (replace(GOOD[0], places=(Place("fc1.weight", 0, 2),)), "must be 9 neurons of 2 entries, got 9"),
    "twice": (Space("again", 9, (Place("fc1.weight", 0),)), "must belong to one space, got it in 'fc1' too"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_specification_is_named(name: str) -> None:
    space, words = WRONG[name]
    spaces = (*GOOD, space) if name == "twice" else (space, *GOOD[1:])
    with pytest.raises(UploadError, match=words):
        check(spaces, mlp((12, 9, 7, 5)).state_dict())


def test_a_specification_that_fits_but_is_wrong_is_found() -> None:
    model = mlp((12, 9, 9, 5))
    half = Space("half", 9, (Place("fc1.weight", 0),))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        UploadError, match=r"space 'half' must leave the outputs unchanged .*got a change of .*fc1\.weight"
    ):
        verify(model, [half], torch.randn(3, 12, generator=rng()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_grown_state_dict_loads() -> None:
    wide = mlp((12, 11, 8, 5), bias=True)
    x = torch.randn(3, 12, generator=rng())
    torch.testing.assert_close(load(mlp((12, 9, 7, 5), bias=True), wide.state_dict())(x), wide(x))


def test_verifying_leaves_every_module_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 2)).train()
    model[2].eval()
    verify(model, derive(model), torch.randn(3, 4))
    assert [module.training for module in model] == [True, True, False, True]
