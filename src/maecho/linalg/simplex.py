"""The quadratic program of Eq. (6): how much each client counts in the common direction.

Only this file knows which solver is used (DAQP; docs/dependencies.md says why).
"""

import daqp
import numpy as np
from numpy.typing import NDArray

# A Gram matrix of float32 gradients is symmetric and dominated by its diagonal only up to float32 rounding.
_GRAM_RTOL = 1e-6

# DAQP is an active-set method for a positive definite Q. A positive `eps_prox` adds a proximal term and repeats until
# stationarity is below `eta_prox`. So Q may be singular, and rounding may have made eigenvalues negative. A smaller
# term is badly conditioned for `primal_tol`; a larger one needs more rounds. A factor of ten either way also works.
_SETTINGS = {"eps_prox": 1e-5, "eta_prox": 1e-10, "primal_tol": 1e-9, "iter_limit": 100_000}
_OPTIMAL, _EQUALITY = 1, 5  # DAQP's codes for an exit and for a constraint
_ON_BOUND = 2 * _SETTINGS["primal_tol"]


def capped_simplex(Q: NDArray[np.float64], cap: float = 1.0) -> NDArray[np.float64]:
    r"""Solve

    .. math:: \min_\alpha \tfrac12 \alpha^\top Q \alpha
              \quad\text{s.t.}\quad \sum_i \alpha_i = 1,\; 0 \le \alpha_i \le C

    for a Gram matrix ``Q`` of shape [N, N] and ``C = cap``. ``Q`` may be singular and of any scale. The answer has
    shape [N]. It is feasible up to rounding, with exact zeros and exact caps. If several answers are optimal, they give
    the same ``Q @ alpha``. Then identical clients get equal weights up to about 1e-6, and ``Q = 0`` gives equal
    weights to all.

    >>> capped_simplex(np.diag([1.0, 3.0])).round(6).tolist()
    [0.75, 0.25]
    """
    Q = np.asarray(Q, dtype=np.float64)
    scale = _checked_scale(Q)
    n = len(Q)
    cap = min(cap, 1.0)  # Σα = 1 and α ≥ 0 imply α ≤ 1
    # NaN fails this test too. The slack accepts cap = 1 / N, however it was rounded.
    if not cap * n >= 1 - 1e-12:
        raise ValueError(f"cap must be at least 1/N = {1 / n:g} for the {n} weights to sum to 1, got {cap:g}")
    if scale == 0 or cap * n <= 1 + 1e-12:
        return np.full(n, 1 / n)

    lower, upper = np.append(np.zeros(n), 1.0), np.append(np.full(n, cap), 1.0)
    sense = np.zeros(n + 1, dtype=np.intc)
    sense[n] = _EQUALITY
    H = np.ascontiguousarray((Q + Q.T) / (2 * scale))
    alpha, _, flag, info = daqp.solve(H, np.zeros(n), np.ones((1, n)), upper, lower, sense, **_SETTINGS)
    if flag != _OPTIMAL:
        raise RuntimeError(f"DAQP stopped with exit flag {flag} after {info['iterations']} iterations (N = {n})")

    # The solver cannot tell a weight this near to a bound from the bound, so it is set to the bound.
    alpha = np.where(alpha < _ON_BOUND, 0.0, np.where(alpha > cap - _ON_BOUND, cap, alpha))
    return _sum_to_one(alpha, cap)


def _checked_scale(Q: NDArray[np.float64]) -> float:
    """The largest diagonal entry of Q, once Q is known to look like a Gram matrix."""
    if Q.ndim != 2 or Q.shape[0] != Q.shape[1] or Q.size == 0:
        raise ValueError(f"Q must be a square matrix with at least one row, got shape {list(Q.shape)}")
    if not np.isfinite(Q).all():
        raise ValueError(f"Q must be finite, got {np.count_nonzero(~np.isfinite(Q))} entries that are NaN or infinite")
    scale = float(Q.diagonal().max())
    largest = float(np.abs(Q).max())
    asymmetry = float(np.abs(Q - Q.T).max())
    if asymmetry > _GRAM_RTOL * largest:
        raise ValueError(f"Q must be symmetric, got entries that differ from their mirror image by up to {asymmetry:g}")
    if Q.diagonal().min() < 0 or largest > (1 + _GRAM_RTOL) * scale:
        raise ValueError("Q must be positive semidefinite, got an entry that is too large for the diagonal of Q")
    return scale


def _sum_to_one(alpha: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    """Make the sum exactly 1. The excess Σα - 1 is within the solver's tolerance. It is spread over the weights inside
    their bounds, in proportion to how far each can move."""
    excess = float(alpha.sum()) - 1
    if abs(excess) <= 1e-13:
        return alpha
    room = alpha if excess > 0 else cap - alpha
    inside = np.where((alpha > 0) & (alpha < cap), room, 0.0)
    room = inside if inside.sum() > abs(excess) else room
    return np.clip(alpha - excess / float(room.sum()) * room, 0.0, cap)
