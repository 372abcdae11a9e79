"""Gram matrices of several clients in one unit of the constant input that a bias reads; see units.py.

What is linear in a Gram needs no common unit. Projectors and damped products are not: they compare the directions of
one client with those of another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal, add_into, eigenvalues
from maecho.linalg.units import of_both_sides, times_last, unit_of

if TYPE_CHECKING:
    from jaxtyping import Float


def squares_and_rows(G: Spectrum) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
    """Σ ‖x‖² and the number of rows, of a Gram matrix of (x, 1)."""
    assert G.unit is not None
    last = G.basis[:, -1].double().square()
    constant = (G.values.double() * last).sum(-1)
    if G.rest is not None:
        constant = constant + G.rest.double() * (1 - last.sum(-1)).clamp(min=0)
    return (G.trace - constant).clamp(min=0), constant / G.unit.double() ** 2


def mean_of_data(G: Spectrum | Diagonal) -> Float[Tensor, " g"]:
    """The mean eigenvalue along the data, without the constant input of a bias. If there are no data but that constant,
    it is the mean over all inputs."""
    whole = G.trace / G.width
    if isinstance(G, Diagonal) or G.unit is None:
        return whole
    squares, _ = squares_and_rows(G)
    return torch.where(squares > 0, squares / max(1, G.width - 1), whole)


class CommonUnit:
    """The unit of the constant of one layer that its clients share: c² is the mean square of all their data, or the
    mean of their mean squares, in which a client with more data counts no more than another.

    Args:
        weighting: "examples" for the former, "uniform" for the latter.
    """

    def __init__(self, weighting: Literal["examples", "uniform"] = "examples") -> None:
        self._weighting = weighting
        self._sums: dict[str, Tensor] = {}
        self._width = 1

    def add(self, G: Spectrum | Diagonal) -> None:
        """Add a client."""
        if isinstance(G, Spectrum) and G.unit is not None:
            squares, rows = squares_and_rows(G)
            self._width = G.width - 1
            if self._weighting == "uniform":
                there = rows > 0
                squares = torch.where(there, squares / rows.where(there, torch.ones_like(rows)), 0)
                rows = there.to(squares)
            add_into(self._sums, "squares", squares)
            add_into(self._sums, "rows", rows)

    @property
    def unit(self) -> Float[Tensor, " g"] | None:
        """c for each group. None if the layer has no bias."""
        return unit_of(self._sums["squares"], self._sums["rows"], self._width) if self._sums else None


def in_unit(G: Spectrum | Diagonal, unit: Float[Tensor, " g"] | None) -> Spectrum | Diagonal:
    """The Gram matrix of (x, c) with c = `unit`, by default that of G itself. All its inputs have one unit. A matrix
    without a constant stays as it is."""
    if isinstance(G, Diagonal) or G.unit is None:
        return G
    factor = (G.unit if unit is None else unit).double() / G.unit.double()
    plain = replace(G, unit=None)
    if bool((factor == 1).all()):
        return plain
    d = G.width
    if G.rank + 1 >= d:
        return Spectrum.of_dense(of_both_sides(plain.total().matrix, factor)).to(dtype=G.basis.dtype)
    # D A D = K diag(w) Kᵀ + t I. The matrix K has one column more than the basis if there is a rest.
    K = times_last(G.basis.double().mT, factor).mT
    w, rest = G.values.double(), G.rest
    if rest is not None:
        t = rest.double()
        constant = torch.zeros_like(K[..., :1])
        constant[:, -1] = 1
        K, w = torch.cat([K, constant], -1), torch.cat([w - t[:, None], (t * (factor**2 - 1))[:, None]], -1)
    Q, R = torch.linalg.qr(K)
    small = (R * w.unsqueeze(-2)) @ R.mT
    if rest is not None:
        small.diagonal(dim1=-2, dim2=-1).add_(rest.double()[:, None])
    s, U = eigenvalues(small)
    return Spectrum(s.flip(-1), (Q @ U.flip(-1)).to(G.basis.dtype), rest)


def in_terms_of(W: Float[Tensor, "g o d"], unit: Float[Tensor, " g"] | None) -> Float[Tensor, "g o d"]:
    """[W b] for inputs (x, 1) -> [W b/c] for inputs (x, c)."""
    return W if unit is None else times_last(W, 1 / unit)


def in_terms_of_one(W: Float[Tensor, "g o d"], unit: Float[Tensor, " g"] | None) -> Float[Tensor, "g o d"]:
    """The inverse: [W b/c] -> [W b]."""
    return W if unit is None else times_last(W, unit)
