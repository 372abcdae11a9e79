"""Kronecker-factored merging: it agrees with dense solves, and in special cases with simpler methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.linalg.spectra import Spectrum
from maecho.linalg.sylvester import Sylvester
from maecho.upload.client import make_upload
from support.clients import ZOO, batches, clients, network, rng
from support.tiny import with_statistics
from support.units import scales

EXACT: dict[str, Any] = {"tolerance": 1e-12, "ridge": 1e-2, "damping": 0.0}


def psd(groups: int, d: int, rank: int, draw: torch.Generator) -> Tensor:
    X = torch.randn(groups, rank, d, generator=draw, dtype=torch.float64)
    return X.mT @ X


def dense_solution(Ws: list[Tensor], As: list[Tensor], Bs: list[Tensor], average: Tensor, ridge: float) -> Tensor:
    """One system of all entries: vec(B W A) = (A ⊗ B) vec(W) column by column; a pseudoinverse for ridge 0."""
    solved = []
    for g in range(len(average)):
        T = sum(torch.kron(A[g].contiguous(), B[g].contiguous()) for A, B in zip(As, Bs, strict=True))
        assert isinstance(T, Tensor)
        rho = ridge * T.diagonal().mean()
        right = sum((B[g] @ (W[g] - average[g]) @ A[g]).T.flatten() for W, A, B in zip(Ws, As, Bs, strict=True))
        D = torch.linalg.pinv(T + rho * torch.eye(len(T), dtype=T.dtype), hermitian=True, rtol=1e-10) @ right
        solved.append(average[g] + D.reshape(average.shape[2], average.shape[1]).T)
    return torch.stack(solved)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("ranks", [(9, 9), (2, 3), (4, 1)])
@pytest.mark.parametrize("ridge", [1e-1, 1e-3])
@pytest.mark.parametrize("damping", [0.0, 1e-2])
def test_it_is_the_dense_solve(groups: int, ranks: tuple[int, int], ridge: float, damping: float) -> None:
    draw = rng(3)
    o, d, N = 4, 6, 3
    Ws = [torch.randn(groups, o, d, generator=draw, dtype=torch.float64) for _ in range(N)]
    As = [psd(groups, d, ranks[0], draw) for _ in range(N)]
    Bs = [psd(groups, o, ranks[1], draw) for _ in range(N)]
    average = torch.stack(Ws).mean(0)
    equation = Sylvester()
    for W, A, B in zip(Ws, As, Bs, strict=True):
        equation.add(W, Spectrum.of_dense(A), Spectrum.of_dense(B), damping, 2 * damping)
    found = equation.solve(average, ridge, 1e-13, 500)
    assert found.residual <= 1e-13
    damped = [
        [M + share * torch.eye(M.shape[-1], dtype=M.dtype) for M in Ms]
        for Ms, share in ((As, damping), (Bs, 2 * damping))
    ]
    torch.testing.assert_close(found.matrix, dense_solution(Ws, *damped, average, ridge), rtol=1e-8, atol=1e-8)


def test_without_a_ridge_it_moves_no_further_than_the_equation_says() -> None:
    """A singular equation with a solution: the answer solves it, and is the average where no client has information."""
    draw = rng(4)
    Ws = [torch.randn(1, 4, 6, generator=draw, dtype=torch.float64) for _ in range(2)]
    A, B = psd(1, 6, 3, draw), [psd(1, 4, 2, draw) for _ in range(2)]
    A[:, :, 5] = A[:, 5] = 0
    average = (Ws[0] + Ws[1]) / 2
    equation = Sylvester()
    for W, own in zip(Ws, B, strict=True):
        equation.add(W, Spectrum.of_dense(A), Spectrum.of_dense(own))
    found = equation.solve(average, 0.0, 1e-12, 500).matrix
    left, right = sum(b @ found @ A for b in B), sum(b @ W @ A for b, W in zip(B, Ws, strict=True))
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(found[..., 5], average[..., 5])


@pytest.mark.parametrize("name", ZOO)
def test_one_client_comes_back_wherever_it_has_information(name: str) -> None:
    A = ZOO[name].unsqueeze(0)
    B, W = psd(1, 3, 9, rng(5)), torch.randn(1, 3, A.shape[-1], generator=rng(6), dtype=torch.float64)
    equation = Sylvester()
    equation.add(W, Spectrum.of_dense(A), Spectrum.of_dense(B))
    found = equation.solve(torch.zeros_like(W), 0.0, 1e-12, 50)
    U = Spectrum.of_dense(A).map(torch.ones_like)
    torch.testing.assert_close(found.matrix, U.after(W), rtol=1e-5, atol=1e-5)
    assert found.iterations <= 2  # the preconditioner is the exact inverse
    assert found.known == (name != "zero")


def with_outputs(upload: maecho.Upload, scale: float) -> maecho.Upload:
    """B_i = scale · I."""
    eyes = {layer.name: scale * torch.eye(layer.shape(upload.weights)[1]) for layer in upload.layers}
    return with_statistics(upload, gradients=eyes)


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1e-1])
def test_with_outputs_that_matter_alike_it_is_regmean(ridge: float) -> None:
    """B_i = n_i I: the sum over n_i examples that all weigh every output the same."""
    uploads = [with_outputs(u, u.examples) for u in clients(3, torch.float64, rank=None)]
    merged = maecho.aggregate(uploads, "kronecker", ridge=ridge, damping=0.0, tolerance=1e-12)
    expected = maecho.aggregate(uploads, "regmean", ridge=ridge)
    for key in expected:
        torch.testing.assert_close(merged[key], expected[key], rtol=1e-6, atol=1e-6)


def test_twice_the_examples_count_twice() -> None:
    """A client that has every example twice counts as two clients with its data."""
    one, other = network(0, torch.float64), network(1, torch.float64)
    data = [batches(i, dtype=torch.float64) for i in range(2)]
    statistics = ["gram", "gradients"]
    a = make_upload(one, data[0], "a", statistics, rank=None)
    b = make_upload(other, data[1], "b", statistics, rank=None)
    double = make_upload(other, [*data[1], *data[1]], "b", statistics, rank=None)
    merged = maecho.aggregate([a, double], "kronecker", **EXACT)
    expected = maecho.aggregate([a, b, replace(b, client="c")], "kronecker", **EXACT)
    for key in expected:
        torch.testing.assert_close(merged[key], expected[key], rtol=1e-6, atol=1e-6)
    uniform = [maecho.aggregate([a, x], "kronecker", weighting="uniform", **EXACT) for x in (b, double)]
    for key in expected:
        torch.testing.assert_close(uniform[0][key], uniform[1][key], rtol=1e-6, atol=1e-6)


def test_uploads_give_the_dense_solve() -> None:
    uploads = clients(3, torch.float64, rank=None)
    merged = maecho.aggregate(uploads, "kronecker", **EXACT)
    average = maecho.aggregate(uploads, "fedavg")
    for layer in uploads[0].layers:
        D = scales(uploads, layer.name)
        expected = dense_solution(
            [layer.matrix(u.weights) / D for u in uploads],
            [D[:, None] * u.statistics["gram"][layer.name].dense() * D for u in uploads],
            [u.statistics["gradients"][layer.name].dense() / u.examples for u in uploads],
            layer.matrix(average) / D,
            EXACT["ridge"],
        )
        torch.testing.assert_close(layer.matrix(merged) / D, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("damping", ["released", 0.1])
def test_damping_is_on_the_diagonals(damping: Any, weighting: Any) -> None:
    """The damping of the release is 1 on means over examples."""
    uploads = clients(3, torch.float64, rank=None)
    merged = maecho.aggregate(uploads, "kronecker", damping=damping, weighting=weighting, tolerance=1e-12, ridge=0.0)
    average = maecho.aggregate(uploads, "fedavg", weighting=weighting)

    def damped(M: Tensor, data: int) -> Tensor:
        shift = 1.0 if damping == "released" else damping * float(M.diagonal(dim1=-2, dim2=-1)[..., :data].mean())
        return M + shift * torch.eye(M.shape[-1], dtype=M.dtype)

    for layer in uploads[0].layers:
        D = scales(uploads, layer.name, weighting)
        D = torch.ones_like(D) if damping == "released" else D
        count = [u.examples if weighting == "examples" else 1 for u in uploads]
        expected = dense_solution(
            [layer.matrix(u.weights) / D for u in uploads],
            [damped(D[:, None] * u.statistics["gram"][layer.name].dense() * D / u.examples, -1) for u in uploads],
            [
                damped(B := u.statistics["gradients"][layer.name].dense() / u.examples, B.shape[-1]) * n
                for u, n in zip(uploads, count, strict=True)
            ],
            layer.matrix(average) / D,
            0.0,
        )
        torch.testing.assert_close(layer.matrix(merged) / D, expected, rtol=1e-6, atol=1e-6)


def test_an_embedding_is_solved_token_by_token() -> None:
    models, uploads = [], []
    for i in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 4)).double()
        tokens = torch.randint(0, 4, (9, 2), generator=rng(i))
        models.append(model)
        uploads.append(make_upload(model, [tokens], f"{i}", ["gram", "gradients"], rank=None))
    merged = maecho.aggregate(uploads, "kronecker", **EXACT)["0.weight"]
    layer = uploads[0].layers[0]
    average = torch.stack([m[0].weight.detach() for m in models]).mean(0)
    expected = dense_solution(
        [layer.matrix(u.weights) for u in uploads],
        [u.statistics["gram"]["0"].dense() for u in uploads],
        [u.statistics["gradients"]["0"].dense() / u.examples for u in uploads],
        average.T.unsqueeze(0),
        EXACT["ridge"],
    )
    torch.testing.assert_close(merged, expected[0].T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged[4], average[4])  # a token that nobody has


def test_a_large_ridge_is_the_average() -> None:
    uploads = clients(3, torch.float64)
    strong, average = maecho.aggregate(uploads, "kronecker", ridge=1e9), maecho.aggregate(uploads, "fedavg")
    for key in average:
        torch.testing.assert_close(strong[key], average[key], rtol=1e-6, atol=1e-6)


def test_too_few_iterations_are_not_passed_over() -> None:
    uploads = clients(3, torch.float64)
    with pytest.warns(UserWarning, match="every layer must come to a residual of 1e-06, got .* at '0', .* at '2'"):
        maecho.aggregate(uploads, "kronecker", iterations=1)


def test_layers_without_information_are_named_as_averaged() -> None:
    given = clients(2)
    silent = [
        with_statistics(
            u, gradients={n: B.map(lambda s, n=n: s * (n != "2")) for n, B in u.statistics["gradients"].items()}
        )
        for u in given
    ]
    merged, average = maecho.aggregate(silent, "kronecker"), maecho.aggregate(given, "fedavg")
    assert merged.averaged == ("2.weight", "2.bias")
    torch.testing.assert_close(merged["2.weight"], average["2.weight"])
