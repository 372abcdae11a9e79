"""Permuting along the spaces leaves a network's outputs as they were; a wrong specification is found and named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from maecho.errors import InputError
from maecho.lab.networks import mlp
from maecho.network.spaces import Place, Space, check, holding, load, permute, verify
from maecho.network.tracing import derive
from support.clients import rng
from support.networks import NETWORKS, with_running_statistics
from support.odd_networks import ASSUMED, ODD


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_unchanged(name: str) -> None:
    make, shape = NETWORKS[name]
    x = torch.randn(shape, generator=rng())
    model = with_running_statistics(make(), x)
    spaces = derive(model, x)
    verify(model, spaces, x)
    orders = {space.name: torch.randperm(space.size, generator=rng(1)) for space in spaces}
    other = make().eval()
    other.load_state_dict(permute(model.state_dict(), spaces, orders))
    torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-5)
    assert not torch.equal(next(other.parameters()), next(model.parameters()))


GOOD = derive(mlp((12, 9, 7, 5)), torch.zeros(2, 12))
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
    with pytest.raises(InputError, match=words):
        check(spaces, mlp((12, 9, 7, 5)).state_dict())


def test_a_specification_that_fits_but_is_wrong_is_found() -> None:
    model = mlp((12, 9, 9, 5))
    half = Space("half", 9, (Place("fc1.weight", 0),))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        InputError, match=r"space 'half' must leave the outputs unchanged .*got a change of .*fc1\.weight"
    ):
        verify(model, [half], torch.randn(3, 12, generator=rng()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ASSUMED)
def test_what_was_assumed_of_odd_networks_does_not_hold(name: str) -> None:
    make, x = ODD[name]
    model = make().eval()
    found, reasons = holding(model, [ASSUMED[name]], x)
    assert found == ()
    (reason,) = reasons.values()
    assert float(re.fullmatch(r"permuting its neurons changed the outputs by (\S+) of their norm", reason)[1]) > 0.01  # type: ignore[index]


def test_two_neurons_do_change_places() -> None:
    """A random order of two neurons would leave half of all such spaces untried."""
    model = mlp((4, 2, 3))
    for seed in range(4):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            wrong = Space("half", 2, (Place("fc1.weight", 0),))
            assert holding(model, [wrong], torch.randn(3, 4))[0] == ()


def test_outputs_that_are_no_numbers_prove_nothing() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 0

    class Words(nn.Linear):
        def forward(self, x: Tensor) -> list[object]:  # type: ignore[override]
            return ["a word", x.argmax(1), None]

    for model, words in ((Broken(4, 3), "NaN or infinity"), (Words(4, 3), "none")):
        with pytest.raises(
            InputError, match=f"{type(model).__name__} must give out finite numbers for its .* got {words}"
        ):
            holding(model, [], torch.zeros(2, 4))


def test_all_outputs_count() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> dict[str, object]:
            h = self.one(x)
            return {"of": (self.two(h), [h])}

    model, x = Two(), torch.randn(3, 4, generator=rng())
    hidden = Space("one", 5, (Place("one.weight", 0), Place("one.bias", 0), Place("two.weight", 1)))
    assert holding(model, [hidden], x)[0] == ()
    assert derive(model, x) == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_networks_of_any_precision_keep_their_spaces(dtype: torch.dtype) -> None:
    model = mlp((12, 64, 48, 5), bias=True).to(dtype)
    x = torch.randn(4, 12, generator=rng()).to(dtype)
    spaces = derive(model, x)
    assert len(spaces) == 2
    assert holding(model, spaces, x) == (spaces, {})


def test_a_grown_state_dict_loads() -> None:
    wide = mlp((12, 11, 8, 5), bias=True)
    x = torch.randn(3, 12, generator=rng())
    torch.testing.assert_close(load(mlp((12, 9, 7, 5), bias=True), wide.state_dict())(x), wide(x))


def test_verifying_leaves_every_module_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 2)).train()
    model[2].eval()
    x = torch.randn(3, 4)
    verify(model, derive(model, x), x)
    assert [module.training for module in model] == [True, True, False, True]


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_a_space_is_tried_at_outputs_of_any_size(scale: float) -> None:
    """Squares of these outputs overflow float32, or are 0."""
    model, x = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)), torch.eye(4)
    right = Space("right", 6, (Place("0.weight", 0), Place("2.weight", 1)))
    wrong = Space("wrong", 6, (Place("0.weight", 0),))
    found, reasons = holding(model, [right], scale * x)
    assert found == (right,)
    assert holding(model, [wrong], scale * x)[0] == ()
    assert not reasons
