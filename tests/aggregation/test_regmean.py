"""RegMean against the least-squares problem that it solves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import maecho
from maecho.aggregation import RegMean
from support.clients import batches, clients, network, rng


def test_it_is_least_squares_on_the_pooled_inputs() -> None:
    """One linear layer: the merged one is the regression of all clients' outputs on all clients' inputs."""
    draw = rng(1)
    models = [nn.Sequential(nn.Linear(6, 4)).double() for _ in range(3)]
    data = [torch.randn(20, 6, generator=draw, dtype=torch.float64) for _ in models]
    uploads = [
        maecho.make_upload(m, [x], f"c{i}", rank=None) for i, (m, x) in enumerate(zip(models, data, strict=True))
    ]
    merged = maecho.aggregate(uploads, "regmean", ridge=0.0)
    X = torch.cat([torch.cat([x, torch.ones(20, 1)], 1) for x in data])
    Y = torch.cat([m(x) for m, x in zip(models, data, strict=True)]).detach()
    solution = torch.linalg.lstsq(X, Y).solution.T
    torch.testing.assert_close(merged["0.weight"], solution[:, :-1])
    torch.testing.assert_close(merged["0.bias"], solution[:, -1])


def test_where_nobody_has_inputs_the_average_stands() -> None:
    models = [nn.Sequential(nn.Linear(4, 3, bias=False)).double() for _ in range(2)]
    x = torch.randn(10, 4, generator=rng(), dtype=torch.float64)
    x[:, 2:] = 0
    uploads = [maecho.make_upload(m, [x + i * x.flip(0)], f"c{i}", rank=None) for i, m in enumerate(models)]
    for ridge in (0.0, 1e-3):
        merged = maecho.aggregate(uploads, "regmean", ridge=ridge)["0.weight"]
        average = (models[0][0].weight + models[1][0].weight).detach() / 2
        torch.testing.assert_close(merged[:, 2:], average[:, 2:])


def test_a_large_ridge_is_the_average_and_full_shrinkage_a_diagonal_solve() -> None:
    uploads = clients(3, torch.float64, rank=None)
    strong, average = maecho.aggregate(uploads, "regmean", ridge=1e9), maecho.aggregate(uploads, "fedavg")
    for key in average:
        torch.testing.assert_close(strong[key], average[key], rtol=1e-6, atol=1e-6)
    layer = uploads[0].layers[0]
    diagonals = [u.statistics["gram"]["0"].dense().diagonal(dim1=-2, dim2=-1) for u in uploads]
    sums = sum(layer.matrix(u.weights) * d.unsqueeze(1) for u, d in zip(uploads, diagonals, strict=True))
    got = layer.matrix(maecho.aggregate(uploads, "regmean", ridge=0.0, shrink=0.0))
    torch.testing.assert_close(got, sums / sum(diagonals).unsqueeze(1))  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*not sent. .*since the inputs are not one tensor")
def test_an_embedding_is_averaged_token_by_token() -> None:
    models = [nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(4, 2)) for _ in range(2)]
    tokens = [torch.tensor([[0, 0], [0, 1]]), torch.tensor([[0, 1], [1, 1]])]
    uploads = [maecho.make_upload(m, [t], f"c{i}") for i, (m, t) in enumerate(zip(models, tokens, strict=True))]
    merged = maecho.aggregate(uploads, "regmean", ridge=0.0)["0.weight"]
    E = [m[0].weight.detach() for m in models]
    torch.testing.assert_close(merged[0], (3 * E[0][0] + E[1][0]) / 4)
    torch.testing.assert_close(merged[1], (E[0][1] + 3 * E[1][1]) / 4)
    torch.testing.assert_close(merged[2], (E[0][2] + E[1][2]) / 2)  # a token that nobody has


def test_cutting_the_grams_costs_little() -> None:
    def outputs(rank: object) -> torch.Tensor:
        uploads = [maecho.make_upload(network(i), batches(i), f"c{i}", rank=rank) for i in range(3)]  # type: ignore[arg-type]
        model = network()
        model.load_state_dict(maecho.aggregate(uploads, "regmean"))
        return model(batches(1)[0][0]).detach()

    full = outputs(None)
    assert float((outputs(0.999) - full).norm() / full.norm()) < 0.2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ridge": -1.0}, "ridge must be at least 0"), ({"shrink": 1.5}, r"shrink must be in \[0, 1\]")],
)
def test_bad_options(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RegMean(**options)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_directions_that_were_cut_do_not_count_as_without_inputs(ridge: float) -> None:
    """A direction that one client keeps and the other has cut is not the first client's alone: both have inputs there.
    The inputs lie in all directions nearly alike, as they do behind a normalisation."""
    models = [nn.Sequential(nn.Linear(40, 8)).double() for _ in range(2)]
    data = [torch.randn(300, 40, generator=rng(i), dtype=torch.float64) for i in range(2)]

    def merged(rank: int | None) -> torch.Tensor:
        pairs = enumerate(zip(models, data, strict=True))
        uploads = [maecho.make_upload(m, [x], f"c{i}", ["gram"], rank=rank) for i, (m, x) in pairs]
        return maecho.aggregate(uploads, "regmean", ridge=ridge)["0.weight"]

    whole, cut = merged(None), merged(10)
    gap = (models[0][0].weight - models[1][0].weight).detach().norm()
    assert (cut - whole).norm() < 0.15 * gap
