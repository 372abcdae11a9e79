"""Every method gives the same function in other units, or says why it does not.

Inputs times s with the first weights times 1/s are the same function. So are the outputs of a ReLU layer times s, with
the following weights times 1/s.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.aggregation import EchoChain, FedAvg, MAEcho, MAEchoOT
from maecho.linalg.spectra import Spectrum
from maecho.network.spaces import load
from maecho.statistics import STATISTICS
from support.contract import EVERY

DEPENDENT = {
    "ma-echo": "the release's recursion adds a fixed number to squares of inputs",
    "ma-echo+ot": "as ma-echo",
    "ma-echo released qp": "as ma-echo",
    "ma-echo limit": "as ma-echo",
    "ma-echo+ot activations": "as ma-echo",
    "ma-echo norm": "Norm makes steps of a fixed length, and weights have the inverse unit of their inputs",
    "kronecker": "FedLPA's release adds 1 to the means over examples",
    "dense": "it trains by gradient steps of a fixed size on weights, whose gradients have units",
}
"""Settings of methods that depend on units by their definition, and why."""

MORE: dict[str, Any] = {
    "ma-echo exact": MAEcho(projector="exact"),
    "ma-echo+ot exact": MAEchoOT(projector="exact"),
    "ma-echo random start": MAEcho(form="printed", start="random"),
    "echo-chain lda": EchoChain(draws=500, head="lda"),
    "echo-chain without features": EchoChain(draws=500, features=False, noise="gaussian"),
    "relay": None,
}
ALL: dict[str, Any] = {**EVERY, **MORE}


def mlp(seed: int, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = (nn.Linear(12, 9, bias=bias), nn.ReLU(), nn.Linear(9, 7, bias=bias), nn.ReLU())
        return nn.Sequential(*sizes, nn.Linear(7, 5, bias=bias)).double()


def convolutions(seed: int) -> nn.Sequential:
    """With a grouped convolution."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(24, 4)).double()


def data(seed: int, shape: tuple[int, ...] = (12,), classes: int = 5) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    size = torch.randn(1, *shape, generator=draw, dtype=torch.float64).abs()
    return [
        (torch.randn(16, *shape, generator=draw).double() * size + seed, torch.arange(16) % classes)
        for _ in range(3 + seed)
    ]


def rescaled(model: nn.Sequential, inputs: float, hidden: float) -> nn.Sequential:
    """The same function of inputs that are multiplied by a number."""
    first, second = model[0], model[2]
    with torch.no_grad():
        first.weight.mul_(hidden / inputs)
        if first.bias is not None:
            first.bias.mul_(hidden)
        second.weight.div_(hidden)
    return model


def outputs(
    name: str, make: Any, all_data: list[list[tuple[Tensor, Tensor]]], inputs: float, hidden: float, rank: Any = None
) -> Tensor:
    """What the merged model gives out on the data, after the clients were rescaled."""
    models = [rescaled(make(i), inputs, hidden) for i in range(len(all_data))]
    moved = [[(x * inputs, y) for x, y in own] for own in all_data]
    if name == "relay":
        merged = maecho.relay(make(0), list(zip(models, moved, strict=True)), progress=False)
    else:
        uploads = [
            maecho.make_upload(m, own, f"c{i}", STATISTICS, rank)
            for i, (m, own) in enumerate(zip(models, moved, strict=True))
        ]
        merged = maecho.aggregate(uploads, ALL[name], model=make(0))
    with torch.no_grad():
        found: Tensor = load(make(0), merged)(torch.cat([x for own in moved for x, _ in own]))
    return found


@cache
def usual(name: str) -> Tensor:
    """The same in the usual units."""
    return outputs(name, mlp, [data(i) for i in range(3)], 1.0, 1.0)


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


# Powers of 2 keep every digit. So draws and signs of eigenvectors stay as they were.
@pytest.mark.parametrize(("inputs", "hidden"), [(2.0**-10, 1.0), (2.0**10, 1.0), (1.0, 2.0**-7), (1.0, 2.0**7)])
@pytest.mark.parametrize("name", [name for name in ALL if name not in DEPENDENT])
def test_units_do_not_matter(name: str, inputs: float, hidden: float) -> None:
    assert gap(outputs(name, mlp, [data(i) for i in range(3)], inputs, hidden), usual(name)) < 1e-6


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_is_listed_as_dependent_depends(name: str) -> None:
    own = [data(i) for i in range(3)]
    assert max(gap(outputs(name, mlp, own, 1.0, 2.0**k), usual(name)) for k in (-7, 7)) > 1e-3


GRAM = ["regmean", "regmean shrunk", "ma-echo exact", "ma-echo printed", "ma-echo qp", "ma-echo printed limit",
        "ma-echo anchored limit", "kronecker uniform", "afl", "echo-chain", "relay"]  # fmt: skip


@pytest.mark.parametrize("rank", [3, "4x"])
@pytest.mark.parametrize("name", GRAM)
def test_a_cut_keeps_the_same_directions_in_any_units(name: str, rank: Any) -> None:
    own = [data(i) for i in range(3)]
    before = outputs(name, mlp, own, 1.0, 1.0, rank)
    for inputs, hidden in ((2.0**-10, 1.0), (2.0**10, 2.0**7)):
        assert gap(outputs(name, mlp, own, inputs, hidden, rank), before) < 1e-6


@pytest.mark.parametrize("name", [*GRAM, "ot", "fedma"])
def test_huge_and_tiny_units(name: str) -> None:
    own, before = [data(i) for i in range(3)], usual(name)
    for scale in (1e-8, 1e8):
        # A decimal factor rounds. echo-chain draws by eigenvectors, which rounding may turn round.
        tolerance = 0.05 if name == "echo-chain" else 1e-5
        assert gap(outputs(name, mlp, own, scale, 1.0), before) < tolerance
        assert gap(outputs(name, mlp, own, 1.0, scale), before) < tolerance


@pytest.mark.parametrize("name", ["regmean", "ma-echo printed", "kronecker uniform", "ot", "fedma", "relay"])
@pytest.mark.parametrize("network", ["no bias", "grouped convolution"])
def test_layers_without_bias_and_grouped_ones(name: str, network: str) -> None:
    grouped = network == "grouped convolution"
    own = [data(i, (2, 6, 6), 4) if grouped else data(i) for i in range(3)]
    make: Any = convolutions if grouped else lambda seed: mlp(seed, bias=False)
    before = outputs(name, make, own, 1.0, 1.0)
    for inputs, hidden in ((2.0**-10, 1.0), (2.0**10, 1.0), (1.0, 2.0**7)):
        assert gap(outputs(name, make, own, inputs, hidden), before) < 1e-6


@pytest.mark.parametrize("name", GRAM)
def test_clients_whose_scales_differ(name: str) -> None:
    """Each client has data of its own scale. All of them in other units are the same problem."""
    own = [[(x * 10.0**-i, y) for x, y in data(i)] for i in range(3)]
    before = outputs(name, mlp, own, 1.0, 1.0)
    assert before.isfinite().all()
    assert gap(outputs(name, mlp, own, 2.0**10, 2.0**-7), before) < 1e-6


@pytest.mark.parametrize("name", GRAM)
def test_inputs_that_are_all_zero(name: str) -> None:
    """Then a bias is all that is known of the first layer."""
    own = [[(0 * x, y) for x, y in data(i)] for i in range(3)]
    assert outputs(name, mlp, own, 1.0, 1.0).isfinite().all()


def test_a_bias_of_regmean_is_not_damped_as_if_it_were_data() -> None:
    """Small inputs, and the same weights everywhere: the bias is the mean of the clients', as examples weigh them."""
    models = [nn.Sequential(nn.Linear(4, 3)).double() for _ in range(2)]
    models[1][0].weight.data.copy_(models[0][0].weight.data)
    x = 1e-3 * torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uploads = [maecho.make_upload(m, [x, x][: i + 1], f"c{i}", rank=None) for i, m in enumerate(models)]
    average = maecho.aggregate(uploads, FedAvg())
    merged = maecho.aggregate(uploads, "regmean", ridge=0.5)
    torch.testing.assert_close(merged["0.weight"], average["0.weight"])
    torch.testing.assert_close(merged["0.bias"], average["0.bias"])


def test_an_upload_that_gives_no_unit_is_read_in_that_of_the_constant() -> None:
    """As files were written before, and as a matrix that someone computed gives it."""
    upload = maecho.make_upload(mlp(0), data(0), "ann", ["gram"], rank=None)
    G = upload.statistics["gram"]
    plain = {name: Spectrum.of_dense(one.dense()) for name, one in G.items()}
    by_hand = {name: one.dense() for name, one in G.items()}
    for grams in (plain, by_hand):
        read = maecho.Upload("ann", upload.examples, upload.weights, upload.layers, statistics={"gram": grams})
        for name, one in read.statistics["gram"].items():
            assert one.unit is not None
            torch.testing.assert_close(one.dense().double(), G[name].dense(), rtol=1e-5, atol=1e-4)
