"""The matrix equation of two factors a client: against a dense solve of the Kronecker form, and exact cases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.sylvester import ROUND_OFF, Factor, Preconditioner, Sylvester
from maecho.linalg.symmetric import Diagonal
from support.clients import rng

OUT, WIDTH = 3, 7

Client = tuple[Tensor, Spectrum | Diagonal, Spectrum]


def psd(d: int, rank: int, seed: int, groups: int = 2) -> Spectrum:
    X = torch.randn(groups, rank, d, generator=rng(seed), dtype=torch.float64)
    return Spectrum.of_dense(X.mT @ X)


def problem(kind: str, n: int = 3) -> list[Client]:
    """Clients with A of low rank, of full rank, or diagonal."""
    found: list[Client] = []
    for i in range(n):
        A = psd(WIDTH, {"thin": 2, "full": 9, "diagonal": 9}[kind], 10 + i)
        W = torch.randn(2, OUT, WIDTH, generator=rng(i), dtype=torch.float64)
        diagonal = Diagonal(A.dense().diagonal(dim1=-2, dim2=-1))
        found.append((W, diagonal if kind == "diagonal" else A, psd(OUT, 4, 20 + i)))
    return found


def by_kronecker(clients: Sequence[Client], start: Tensor, ridge: float, a: float = 0.0, b: float = 0.0) -> Tensor:
    """The solution of (Σ B ⊗ A + ρ) vec W = Σ (B ⊗ A) vec W_i + ρ vec W̄, one group after the other."""
    found = []
    for g in range(len(start)):
        left, right = torch.zeros(OUT * WIDTH, OUT * WIDTH).double(), torch.zeros(OUT * WIDTH).double()
        for W, A, B in clients:
            both = torch.kron(B.dense()[g] + b * torch.eye(OUT).double(), A.dense()[g] + a * torch.eye(WIDTH).double())
            left += both
            right += both @ W[g].flatten()
        rho = ridge * left.diagonal().mean()
        right += rho * start[g].flatten()
        left += rho * torch.eye(OUT * WIDTH).double()
        found.append((torch.linalg.pinv(left, hermitian=True) @ right).view(OUT, WIDTH))
    return torch.stack(found)


def equation(clients: Sequence[Client], a: float = 0.0, b: float = 0.0) -> Sylvester:
    one = Sylvester()
    for W, A, B in clients:
        one.add(W, A, B, a, b)
    return one


START = torch.randn(2, OUT, WIDTH, generator=rng(77), dtype=torch.float64)


@pytest.mark.parametrize("damping", [(0.0, 0.0), (0.4, 1.5)], ids=str)
@pytest.mark.parametrize("ridge", [0.01, 0.5])
@pytest.mark.parametrize("kind", ["thin", "full", "diagonal"])
def test_it_is_the_dense_solution(kind: str, ridge: float, damping: tuple[float, float]) -> None:
    clients = problem(kind)
    found = equation(clients, *damping).solve(START, ridge, 1e-13, 500)
    torch.testing.assert_close(found.matrix, by_kronecker(clients, START, ridge, *damping))
    assert found.known
    assert found.residual <= 1e-13
    assert 1 < found.iterations < 500


def test_one_client_needs_one_step_and_gives_its_weights_back() -> None:
    clients = problem("full", 1)
    found = equation(clients).solve(START, 0.0, 1e-10, 50)
    assert found.iterations == 1
    torch.testing.assert_close(found.matrix, clients[0][0])


def test_factors_that_are_multiples_of_each_other_need_one_step() -> None:
    (W, A, B), (V, *_), *_ = problem("full")
    assert isinstance(A, Spectrum)
    clients: list[Client] = [(W, A, B), (V, A.map(lambda s: 3 * s), psd(OUT, 5, 3))]
    found = equation(clients).solve(START, 0.2, 1e-10, 50)
    assert found.iterations == 1
    torch.testing.assert_close(found.matrix, by_kronecker(clients, START, 0.2))


def test_without_a_ridge_the_start_stays_where_nobody_has_information() -> None:
    clients = problem("thin", 1)
    found = equation(clients).solve(START, 0.0, 1e-12, 50)
    held = torch.linalg.pinv(clients[0][1].dense()) @ clients[0][1].dense()
    torch.testing.assert_close(found.matrix, START + (clients[0][0] - START) @ held)


def test_clients_without_information_are_left_out() -> None:
    clients = problem("full")
    nothing: list[Client] = [
        (100 * START, Spectrum.zero(2, WIDTH), clients[0][2]),
        (100 * START, clients[0][1], Spectrum.zero(2, OUT)),
    ]
    found = equation([*nothing, *clients], 0.3, 0.4).solve(START, 0.1, 1e-12, 500)
    assert torch.equal(found.matrix, equation(clients, 0.3, 0.4).solve(START, 0.1, 1e-12, 500).matrix)
    alone = equation(nothing).solve(START.float(), 0.1, 1e-12, 500)
    assert torch.equal(alone.matrix, START.float().double())
    assert (alone.residual, alone.iterations, alone.known) == (0.0, 0, False)


def test_a_start_that_solves_the_equation_stays_to_the_last_bit() -> None:
    clients = [(START, A, B) for _, A, B in problem("full")]
    found = equation(clients).solve(START, 0.1, 1e-6, 50)
    assert torch.equal(found.matrix, START)
    assert found.iterations == 0
    assert ROUND_OFF == 1e-12


def test_few_iterations_leave_a_residual_that_is_said() -> None:
    clients = problem("thin")
    exact = equation(clients).solve(START, 0.05, 1e-13, 500)
    residuals = [1.0]
    for iterations in (0, 1, 2, 5):
        found = equation(clients).solve(START, 0.05, 1e-13, iterations)
        assert found.iterations == iterations
        residuals.append(found.residual)
        if iterations:
            assert float((found.matrix - exact.matrix).norm()) > 1e-6
    assert residuals[1] == pytest.approx(1)
    assert residuals[-1] < 0.2
    # The tolerance ends it as soon as the residual is that small, and not a step before.
    early = equation(clients).solve(START, 0.05, 0.2, 500)
    assert early.residual <= 0.2
    assert equation(clients).solve(START, 0.05, 0.2, early.iterations - 1).residual > 0.2


def test_a_group_that_is_solved_waits_for_the_others() -> None:
    """One group starts at its solution, the other far from it."""
    clients = problem("full")
    there = by_kronecker(clients, START, 0.0)
    start = torch.stack([there[0], START[1]])
    found = equation(clients).solve(start, 0.0, 1e-12, 500)
    torch.testing.assert_close(found.matrix, there)


@pytest.mark.parametrize("shift", [0.0, 0.7, torch.tensor([[[0.5]], [[2.0]]]).double()], ids=["none", "one", "each"])
@pytest.mark.parametrize("kind", ["thin", "full", "diagonal"])
def test_a_factor_is_its_matrix_and_shift(kind: str, shift: float | Tensor) -> None:
    A = problem(kind)[0][1]
    expected = A.dense() + shift * torch.eye(WIDTH).double()
    M = torch.randn(2, 4, WIDTH, generator=rng(8), dtype=torch.float64)
    for one in (Factor(A, shift), Factor(A, shift).prepare(), Factor(A.to(dtype=torch.float32), shift).prepare()):
        torch.testing.assert_close(one.after(M), M @ expected, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(one.trace, expected.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None])
    torch.testing.assert_close(Factor(A, shift).total().after(M), M @ expected)
    dense = Factor(A, shift).prepare()._total is not None
    assert dense is (kind != "thin")


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_the_preconditioner_inverts_the_nearest_kronecker_product(kind: str, ridge: float) -> None:
    clients = problem(kind)
    factors = [(Factor(A, 0.1), Factor(B, 0.2)) for _, A, B in clients]
    one = Preconditioner(factors, ridge, OUT, WIDTH)
    M = torch.randn(2, OUT, WIDTH, generator=rng(4), dtype=torch.float64)
    found = one(M)
    for g in range(2):
        A = [a.total().after(torch.eye(WIDTH).double().expand(2, -1, -1))[g] for a, _ in factors]
        B = [b.total().after(torch.eye(OUT).double().expand(2, -1, -1))[g] for _, b in factors]
        tau = sum(a.trace() * b.trace() for a, b in zip(A, B, strict=True))
        left = sum(b.trace() * a for a, b in zip(A, B, strict=True))
        right = sum(a.trace() * b for a, b in zip(A, B, strict=True))
        rho = ridge * tau / (OUT * WIDTH)
        assert float(one.rho[g]) == pytest.approx(float(rho))
        both = torch.kron(right, left) / tau + rho * torch.eye(OUT * WIDTH).double()
        torch.testing.assert_close(found[g].flatten(), torch.linalg.solve(both, M[g].flatten()))
