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
from maecho.network.tracing import derive, proven
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


def test_a_network_that_does_not_run_says_so() -> None:
    with pytest.raises(InputError, match=r"Sequential must run on the inputs as torch\.fx traced it .*got: .*shapes"):
        derive(nn.Sequential(nn.Linear(4, 3)), torch.zeros(2, 5))


class Named(nn.Module):
    """Takes its inputs by name, and one of them may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(torch.relu(self.table(tokens)).sum(dim=1) * scale)


def test_inputs_may_have_names() -> None:
    tokens = torch.arange(8).reshape(2, 4)
    for inputs in (tokens, {"tokens": tokens}, {"scale": torch.tensor(2.0), "tokens": tokens}):
        (space,) = derive(Named(), inputs)
        assert {(p.tensor, p.axis) for p in space.places} == {("table.weight", 1), ("head.weight", 1)}
    with pytest.raises(InputError, match="the inputs must hold 'tokens', got 'words'"):
        derive(Named(), {"words": tokens})


def test_the_model_is_left_as_it_was() -> None:
    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.runs.add_(1)
            return super().forward(x.add_(1))

    model = Counting(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).train()
    model.register_buffer("runs", torch.zeros(()))
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda *_: seen.append(_[2]))
    x = torch.zeros(2, 4)
    spaces, left_out = proven(model, x)
    assert ([space.name for space in spaces], left_out) == (["0"], {})
    assert model.training
    assert float(model.get_buffer("runs")) == float(x.sum()) == len(seen) == 0


class Shared(nn.Module):
    """Uses the weight of a layer once more, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x))) + nn.functional.linear(x, self.one.weight)


def test_a_weight_that_is_used_by_itself_keeps_its_order() -> None:
    assert derive(Shared(), torch.randn(3, 5, generator=rng())) == ()


def test_a_second_use_of_a_layer_decides_too() -> None:
    """The first time the layer reads neurons, the second time the inputs, which keep their order."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 3), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.norm(self.one(x)).relu()) + self.two(x)

    assert derive(Twice(), torch.randn(3, 4, generator=rng())) == ()
