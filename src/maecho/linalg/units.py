"""The unit of the constant input that a bias reads.

A bias is one more input that is always 1. Whether 1 is much or little depends on the units of the other inputs x. So
sums over (x, 1) are damped, cut and inverted as sums over (x, c), where c² is the mean square of the entries of x:

    G = Σ (x, 1)(x, 1)ᵀ = D⁻¹ G' D⁻¹,    G' = Σ (x, c)(x, c)ᵀ,    [W b] = [W b/c] D,    D = diag(1, …, 1, c)

If all x are multiplied by a number, G' is multiplied by its square, and nothing that is relative to G' changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def times_last(M: Float[Tensor, "g o d"], factor: Float[Tensor, " g"]) -> Float[Tensor, "g o d"]:
    """The matrix with its last column multiplied by a factor for each group. With c that is M D, with 1/c M D⁻¹."""
    return torch.cat([M[..., :-1], M[..., -1:] * factor.to(M)[:, None, None]], -1)


def of_both_sides(A: Float[Tensor, "g d d"], factor: Float[Tensor, " g"]) -> Float[Tensor, "g d d"]:
    """The symmetric matrix with its last column and its last row multiplied by a factor. With c that is D A D."""
    return times_last(times_last(A, factor).mT, factor).mT


def unit_of(squares: Float[Tensor, " g"], rows: Float[Tensor, " g"], width: int) -> Float[Tensor, " g"]:
    """c of `rows` rows x of this width, with Σ ‖x‖² = squares. It is 1 if all of them are 0."""
    found = (squares.double() / (width * rows.double().clamp(min=torch.finfo(torch.float64).tiny))).sqrt()
    return torch.where((squares > 0) & (rows > 0), found, torch.ones_like(found))


def unit_of_gram(A: Float[Tensor, "g d d"]) -> Float[Tensor, " g"]:
    """c of a Gram matrix of (x, 1)."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    return unit_of(diagonal[:, :-1].sum(-1), diagonal[:, -1], A.shape[-1] - 1)
