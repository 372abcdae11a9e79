"""Rules by operation: on which axis neurons lie afterwards. Each is compared with what a permutation of x does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.network.axes import along, rules
from maecho.network.axes.along import Along, Call
from maecho.network.spaces import Place, take
from support.clients import rng

SHAPE = (2, 6, 4, 3)

CASES: dict[str, tuple[along.Rule, Callable[..., Any], tuple[Any, ...], dict[int, Along | None]]] = {
    "flatten": (along.reshaped, Tensor.flatten, (1,), {0: Along(0, 2), 1: Along(1, 6, 12), 2: None, 3: None}),
    "flatten places": (along.reshaped, Tensor.flatten, (2,), {1: Along(1, 6), 2: Along(2, 4, 3), 3: None}),
    "flatten all": (along.reshaped, Tensor.flatten, (), {0: Along(0, 2, 72), 1: None}),
    "split up": (along.reshaped, Tensor.reshape, (2, 2, 3, 12), {0: Along(0, 2), 1: None, 2: Along(3, 4, 3)}),
    "one more": (along.reshaped, Tensor.unsqueeze, (1,), {0: Along(0, 2), 1: Along(2, 6), 3: Along(4, 3)}),
    "transpose": (along.permuted, Tensor.transpose, (1, -1), {0: Along(0, 2), 1: Along(3, 6), 2: Along(2, 4)}),
    "permute": (along.permuted, torch.permute, ((3, 1, 0, 2),), {0: Along(2, 2), 1: Along(1, 6), 3: Along(0, 3)}),
    "mean": (along.reduced, Tensor.mean, ((2, -1),), {0: Along(0, 2), 1: Along(1, 6), 2: None, 3: None}),
    "mean of one": (along.reduced, Tensor.mean, (1,), {0: Along(0, 2), 1: None, 2: Along(1, 4), 3: Along(2, 3)}),
    "mean, axes kept": (along.reduced, Tensor.mean, (1, True), {1: None, 2: Along(2, 4), 3: Along(3, 3)}),
    "mean of all": (along.reduced, Tensor.mean, (), {0: None, 1: None, 3: None}),
    "variance, unbiased or not": (along.reduced, Tensor.var, (False,), {0: None, 1: None}),
    "pooled": (along.before_last(2), functional.avg_pool2d, (2,), {0: Along(0, 2), 1: Along(1, 6), 2: None, 3: None}),
    "padded": (along.padded, functional.pad, ((1, -1),), {1: Along(1, 6), 2: Along(2, 4), 3: None}),
    "resized": (along.resized, functional.interpolate, ((4, 3),), {1: Along(1, 6), 2: None, 3: None}),
    "one place": (along.indexed, Tensor.__getitem__, ((slice(None), slice(0, 6), 0),), {1: Along(1, 6), 2: None,
                                                                                      3: Along(2, 3)}),
    "last place": (along.indexed, Tensor.__getitem__, ((..., None, -1),), {0: Along(0, 2), 2: Along(2, 4), 3: None}),
    "some neurons": (along.indexed, Tensor.__getitem__, ((slice(None), slice(1, None)),), {1: None, 2: Along(2, 4)}),
    "one example": (along.indexed, Tensor.__getitem__, (0,), {0: None, 1: Along(0, 6), 3: Along(2, 3)}),
    "by a list": (along.indexed, Tensor.__getitem__, ([1, 0],), {0: None, 1: None}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_neurons_are_where_the_rule_says(name: str) -> None:
    rule, function, args, expected = CASES[name]
    x = torch.randn(SHAPE, generator=rng())
    out = function(x, *args)
    for axis, place in expected.items():
        count = SHAPE[axis]
        assert rule(Call(x, out, function, args), Along(axis, count)) == place
        if place is not None:
            order = torch.arange(count).roll(1)
            moved = function(x.index_select(axis, order), *args)
            torch.testing.assert_close(moved, take(out, Place("x", place.axis, place.block), order))


def test_blocks_stay_together() -> None:
    x = torch.randn(2, 6, 4, generator=rng())
    for shape, place in (((2, 24), Along(1, 3, 8)), ((2, 3, 8), Along(1, 3)), ((2, 2, 3, 4), None)):
        assert along.reshaped(Call(x, x.reshape(shape), Tensor.reshape), Along(1, 3, 2)) == place


def test_a_view_of_other_numbers_is_no_reshape() -> None:
    x = torch.randn(2, 6, generator=rng())
    assert along.reshaped(Call(x, x.view(torch.int32), Tensor.view), Along(1, 6)) is None
    assert along.reshaped(Call(x, x[:, :3], Tensor.view), Along(1, 6)) is None


NORMS: dict[str, tuple[nn.Module, tuple[int, ...], list[int] | None]] = {
    "batch": (nn.BatchNorm1d(5), (2, 5, 4), [1]),
    "layer": (nn.LayerNorm(4), (2, 5, 4), [2]),
    "layer, two axes": (nn.LayerNorm((5, 4)), (2, 5, 4), [1, 2]),
    "root mean square": (nn.RMSNorm(4), (2, 5, 4), [2]),
    "one group": (nn.GroupNorm(1, 6), (2, 6, 4), [1]),
    "a group each": (nn.GroupNorm(6, 6), (2, 6, 4), [1]),
    "groups": (nn.GroupNorm(2, 6), (2, 6, 4), None),
    "instances": (nn.InstanceNorm1d(5), (2, 5, 4), [1]),
    "one instance": (nn.InstanceNorm2d(5), (5, 4, 4), [0]),
    "slopes": (nn.PReLU(5), (2, 5, 4), [1]),
    "one slope": (nn.PReLU(), (2, 5, 4), []),
    "no norm": (nn.Bilinear(2, 2, 2), (2, 2), None),
}


@pytest.mark.parametrize("name", NORMS)
def test_axes_with_weights(name: str) -> None:
    module, shape, axes = NORMS[name]
    found = rules.weighted_axes(module, torch.zeros(shape))
    assert (None if found is None else list(found)) == axes


BINARY = {"add", "sub", "mul", "div", "pow", "gt", "ge", "lt", "le", "eq", "ne", "maximum", "minimum", "type_as"}
ARGUMENTS = {"clip": (0.1, 0.5), "clamp": (0.1, 0.5), "softmax": (1,), "log_softmax": (1,), "to": (torch.float64,)}


@pytest.mark.parametrize("name", sorted(rules.ELEMENTWISE & {name for name in dir(Tensor) if name[-1] != "_"}))
def test_elementwise_methods_keep_the_order(name: str) -> None:
    """Run on permuted neurons, on either axis, they give the permuted result."""
    x, y = torch.rand(2, 5, 4, generator=rng()).unbind()

    def run(x: Tensor, y: Tensor) -> Tensor:
        args = (x > 0.5, y) if name == "where" else (y,) if name in BINARY else ARGUMENTS.get(name, ())
        out: Tensor = getattr(x, name)(*args)
        return out

    for axis, order in ((0, torch.randperm(5, generator=rng(1))), (1, torch.randperm(4, generator=rng(2)))):
        moved = run(x.index_select(axis, order), y.index_select(axis, order))
        torch.testing.assert_close(moved, run(x, y).index_select(axis, order))
