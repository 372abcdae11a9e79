"""Compares solvers for the quadratic program of Eq. (6). Prints a table: size x solver, time and worst KKT residual.

    pip install qpsolvers clarabel cvxopt daqp piqp quadprog   # whichever of them; the others are skipped
    python benchmarks/qp.py

The first row of each size is `maecho.linalg.simplex`; the others go through qpsolvers, at tolerances tighter than
their defaults.
"""

import importlib
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maecho.linalg.simplex import capped_simplex

Array = NDArray[np.float64]
Solver = Callable[[Array, float], Array]

OTHERS: dict[str, dict[str, float]] = {
    "clarabel": {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10},
    "cvxopt": {"abstol": 1e-10, "reltol": 1e-10, "feastol": 1e-10},
    "daqp": {},
    "piqp": dict.fromkeys(["eps_abs", "eps_rel", "eps_duality_gap_abs", "eps_duality_gap_rel"], 1e-10),
    "quadprog": {},
}
RIDGE = {"quadprog": 1e-10}  # it refuses a singular Q
SIZES = [(range(1, 51), 500), (range(200, 201), 20), (range(1000, 1001), 8)]
KINDS = ["full", "low rank", "rank one", "duplicated", "nearly duplicated", "graded"]


def problems(sizes: range, count: int) -> Iterator[tuple[Array, float]]:
    """Random Gram matrices with a largest diagonal entry of 1, most of them singular, and caps from 1/N to 1."""
    rng = np.random.default_rng(0)
    for i in range(count):
        n, kind = int(rng.choice(sizes)), KINDS[i % len(KINDS)]
        rank = {"low rank": max(1, n // 3), "rank one": 1}.get(kind, 2 * n)
        G = rng.standard_normal((n, rank)) + rng.standard_normal(rank)
        if "duplicated" in kind:
            G = G[rng.integers(0, max(1, n // 2), n)] + (1e-7 if "nearly" in kind else 0) * G
        if kind == "graded":
            G *= 10 ** rng.uniform(-6, 0, (n, 1))
        Q = G @ G.T
        yield Q / Q.diagonal().max(), float(rng.choice([1.0, min(1.0, 1.5 / n), rng.uniform(1 / n, 1)]))


def kkt_residual(Q: Array, alpha: Array, cap: float) -> float:
    """How far a projected gradient step α -> clip(α - (Qα - ν), 0, C) moves α, for the best ν among the entries of Qα.

    Unlike the residual of the tests it needs no weight to be exactly on its bound, which interior points never are.
    """
    g = Q @ alpha
    step = np.clip((alpha - g)[:, None] + g, 0, cap) - alpha[:, None]
    return max(float(np.abs(step).max(axis=0).min()), abs(float(alpha.sum()) - 1))


def through_qpsolvers(name: str) -> Solver:
    qpsolvers: Any = importlib.import_module("qpsolvers")

    def solve(Q: Array, cap: float) -> Array:
        n = len(Q)
        P, ones = Q + RIDGE.get(name, 0) * np.eye(n), np.ones(n)
        bounds = {"lb": 0 * ones, "ub": cap * ones}
        alpha = qpsolvers.solve_qp(P, 0 * ones, A=ones[None], b=ones[:1], **bounds, solver=name, **OTHERS[name])
        if alpha is None:
            raise RuntimeError(f"{name} found no solution")
        return np.asarray(alpha)

    return solve


def row(solver: Solver, sizes: range, count: int) -> str:
    milliseconds, residuals = [], []
    for Q, cap in problems(sizes, count):
        start = time.perf_counter()
        try:
            alpha = solver(Q, cap)
        except Exception:  # each library has its own class of error; all mean that there is no answer
            alpha = np.full(len(Q), np.nan)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        residuals.append(kkt_residual(Q, alpha, cap))
    r = np.array(residuals)
    failed, loose = np.isnan(r).sum(), (r > 1e-8).sum()
    times = f"{np.median(milliseconds):.2f} | {max(milliseconds):.1f}"
    return f"{times} | {np.nanmax(r, initial=0):.0e} | {loose} of {count} | {failed} of {count}"


def main() -> None:
    warnings.filterwarnings("ignore", module="qpsolvers")
    solvers: dict[str, Solver] = {"maecho.linalg.simplex": capped_simplex}
    for name in OTHERS:
        missing = [package for package in ("qpsolvers", name) if find_spec(package) is None]
        if missing:
            print(f"{name} is skipped: {' and '.join(missing)} not installed")
        else:
            solvers[name] = through_qpsolvers(name)
    print("| N | solver | median ms | slowest ms | worst KKT residual | above 1e-8 | no answer |")
    print("|---|---|---|---|---|---|---|")
    for sizes, count in SIZES:
        label = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        for name, solver in solvers.items():
            print(f"| {label} | {name} | {row(solver, sizes, count)} |", flush=True)


if __name__ == "__main__":
    main()
