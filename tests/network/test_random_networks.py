"""Random networks whose neurons lie on any axis: every space that is found holds, in float64 to 1e-9.

Every method gives one client alone back. With twins, so do all but those that fit the head to labels.

`MAECHO_EXAMPLES=5000 pytest tests/network/test_random_networks.py` tries other networks, and so many of them.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import maecho
from maecho.network.spaces import verify
from maecho.network.tracing import derive, proven
from support.clients import rng
from support.odd_networks import Mean
from support.random_networks import CLASSES, Residual, drawn

EXAMPLES = int(os.environ.get("MAECHO_EXAMPLES", "0"))
"""0 tries the same few networks every time."""


def tried(few: int) -> settings:
    return settings(
        deadline=None,
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


@tried(150)
@given(st.data())
def test_every_space_holds(data: st.DataObject) -> None:
    model, x = drawn(data, 3)
    spaces = derive(model, x)
    verify(model, spaces, x, tolerance=1e-9)
    assert proven(model, x) == (spaces, {})


def outputs(model: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(model, state, (x,))


SHARED = ("fedavg", "ma-echo", "regmean", "fisher", "ot", "ma-echo+ot")
"""They give twins back."""


@tried(25)
@given(st.data())
def test_alone_and_twins_come_back(data: st.DataObject) -> None:
    model, x = drawn(data, 18)
    y = torch.arange(len(x)) % CLASSES
    before = outputs(model, {}, x)
    clients = [[(x[:6], y[:6])], [(x[6:12], y[6:12])]]  # the rest is data that nobody holds
    statistics = ["gram", "projector", "classes", "features", "moments", "fisher"]
    if not x.is_floating_point():
        statistics = ["gram", "projector", "classes", "fisher"]  # tokens have no moments
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # torch, of gradients of one example
        uploads = [maecho.make_upload(model, own, f"{i}", statistics) for i, own in enumerate(clients)]
    merged = {f"{m} of {n}": maecho.aggregate(uploads[:n], m) for m in SHARED for n in (1, 2)}
    merged["relay of 1"] = maecho.relay(model, [(model, clients[0])], progress=False)
    if x.is_floating_point():
        merged["echo-chain of 1"] = maecho.aggregate(uploads[:1], "echo-chain", model=model, draws=100)
    for name, state in merged.items():
        change = float((outputs(model, dict(state), x) - before).norm() / before.norm())
        assert change <= 1e-4, f"{name}: the outputs changed by {change:.1e}"


@tried(30)
@given(st.lists(st.tuples(st.integers(2, 5), st.booleans(), st.booleans()), min_size=1, max_size=4), st.booleans())
def test_ordinary_convolutional_networks_keep_all_their_spaces(
    blocks: list[tuple[int, bool, bool]], mean: bool
) -> None:
    layers: list[nn.Module] = []
    inputs = 2
    for width, norm, residual in blocks:
        layers += [nn.Conv2d(inputs, width, 3, padding=1), *[nn.BatchNorm2d(width)] * norm, nn.ReLU()]
        layers += [Residual(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()))] * residual
        inputs = width
    last: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if mean else [nn.Flatten()]
    layers += [*last, nn.Linear(inputs if mean else inputs * 16, 6), nn.ReLU(), nn.Linear(6, 3)]
    x = torch.randn(3, 2, 4, 4, generator=rng())
    found = derive(nn.Sequential(*layers).eval(), x)
    assert [space.size for space in found] == [*(width for width, _, _ in blocks), 6]


@pytest.mark.parametrize("width", [1, 3])
def test_mlps_on_tokens_keep_their_hidden_neurons(width: int) -> None:
    x = torch.randn(3, 5, 4, generator=rng())
    model = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4), Mean(1),
                          nn.Linear(4, 2))  # fmt: skip
    assert [space.size for space in derive(model, x)] == [width, 4]
