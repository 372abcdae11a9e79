"""MA-Echo line by line, as one reads it in the paper, on plain dense matrices.

    python examples/one_shot.py

`algorithm_1` is Algorithm 1 as printed; `as_released` is what the authors' code does, which reaches the paper's
numbers. Both are for reading: `maecho.aggregate` gives the same result (tests/aggregation/test_ma_echo.py) many times
faster (benchmarks/ma_echo.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Matrices = Sequence[Tensor]
"""One for each client: W_i [out, in], or P_i [in, in]."""


def uniform(gradients: Tensor) -> Tensor:
    """α_i = 1/N, where the quadratic program is not wanted."""
    return torch.full((len(gradients),), 1 / len(gradients), dtype=gradients.dtype)


def projector(X: Tensor, z: float) -> Tensor:
    """P = Xᵀ (X Xᵀ + zI)⁻¹ X for the inputs X [samples, in] of a layer (the paper's Preliminaries)."""
    I = torch.eye(len(X), dtype=X.dtype)  # noqa: E741 (the paper's letter)
    inner: Tensor = torch.linalg.solve(X @ X.T + z * I, X)
    return X.T @ inner


def projector_of_batch_means(means: Tensor, step: float = 0.5, damping: float = 0.01**0.8) -> Tensor:
    """The release's recursion over the mean inputs of batches."""
    d = means.shape[1]
    Q = torch.eye(d, dtype=means.dtype)
    for r in means:
        k = Q @ r
        Q = Q - step * torch.outer(k, k) / (damping + r @ k)
    return torch.eye(d, dtype=means.dtype) - Q


def algorithm_1(
    W_local: Matrices,
    P: Matrices,
    tau: int,
    eta: float,
    mu: float = 1.0,
    solve: Callable[[Tensor], Tensor] = uniform,
) -> Tensor:
    """One layer of Algorithm 1. `solve` answers Eq. (6), given the clients' gradients [clients, out · in]."""
    N = len(W_local)
    I = torch.eye(P[0].shape[0], dtype=P[0].dtype)  # noqa: E741
    W = sum(W_local[1:], W_local[0]) / N  # W⁰ = (1/N) Σ W_i
    V = list(W_local)  # V_i = W_i
    for _ in range(tau):
        gradients = torch.stack([(2 * (W - V[i]) @ P[i]).flatten() for i in range(N)])
        alpha = solve(gradients)  # α* ← Eq. (6)
        D = -sum((2 * alpha[i] * (W - V[i]) @ P[i] for i in range(1, N)), 2 * alpha[0] * (W - V[0]) @ P[0])  # Eq. (7)
        W = W + eta * D
        for i in range(N):
            V[i] = V[i] + (W - V[i]) @ (I - mu / (1 + mu) * P[i])  # Eq. (11), but with V_i where it has W_i
    return W


def as_released(W_local: Matrices, P: Matrices, tau: int = 60, step: float = 1.6, norm: bool = False) -> Tensor:
    """One layer as the authors' code has it: a step size in both updates, I − P, and the mean of the V_i."""
    N = len(W_local)
    I = torch.eye(P[0].shape[0], dtype=P[0].dtype)  # noqa: E741
    W = sum(W_local[1:], W_local[0]) / N
    V = list(W_local)
    for _ in range(tau):
        D = torch.zeros_like(W)
        for i in range(N):
            D = D - step / N * (W - V[i]) @ P[i]
        W = W + D
        for i in range(N):
            move = (W - V[i]) @ (I - P[i])
            if norm:
                move = move / move.norm(dim=1, keepdim=True)
            V[i] = V[i] + step * move
    return sum(V[1:], V[0]) / N


def main() -> None:
    """Five clients with inputs in different corners of one space: who is still served after merging?"""
    rng = torch.Generator().manual_seed(0)
    X = [torch.randn(200, 6, generator=rng) @ torch.randn(6, 40, generator=rng) for _ in range(5)]
    W = [torch.randn(10, 40, generator=rng) for _ in X]
    P = [projector(x, z=1e-2) for x in X]

    def error(merged: Tensor) -> float:
        """How far the merged layer's outputs are from each client's own, on that client's inputs."""
        pairs = zip(W, X, strict=True)
        return sum(float((x @ (merged - w).T).norm() / (x @ w.T).norm()) for w, x in pairs) / len(X)

    print(f"average      {error(sum(W[1:], W[0]) / len(W)):.3f}")
    print(f"algorithm 1  {error(algorithm_1(W, P, tau=60, eta=0.5)):.3f}")
    print(f"as released  {error(as_released(W, P)):.3f}")


if __name__ == "__main__":
    main()
