"""The point where MA-Echo's iterations end, in closed form. It takes one solve a layer, and only sums over clients.

With uniform α and no Norm the steps of `iteration.py` are linear and keep W + (ω/N) Σ V_i (K_i − P_i) constant,
where K_i = P_i (κI − ρP_i)⁻¹ and ω is the pull. All V_i end at W, so

    W∞ = [W⁰ (I − ω P̄) + (ω/N) Σ W_i K_i] [I − ω P̄ + (ω/N) Σ K_i]⁻¹

with P̄ the mean of the P_i. In the released form ω = κ = ρ = λ, and with soft projectors P_i = G_i (G_i + zI)⁻¹ that is
RegMean with a prior at the average: ωK_i = P_i (I − P_i)⁻¹ = G_i / z. The printed form has ω = 2η, κ = 1, ρ = μ/(1+μ).
The anchored form is gradient descent on Σ ‖(W − W_i) P_i‖²:

    W∞ = W⁰ + [Σ (W_i − W⁰) P_i²] [Σ P_i²]⁺

The steps reach it if they are small enough. Along a direction in which all P_i have the eigenvalue s, a step multiplies
the mean of W − V_i by (1 − ωs)(1 − κ + ρs), and what else there is by 1 − κ + ρs. The largest s is 1, as for the
constant input of a bias. So the released form needs λ < 2, and the printed one (2η − 1) ρ < 1. The anchored form is
gradient descent, and needs 2ηρ < 2.
"""

from __future__ import annotations

from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.steps.iteration import Coefficients
from maecho.linalg.sums.weighted import Sums
from maecho.linalg.symmetric import Diagonal

CLOSEST = 1e-9
"""κ − ρs is at least this share of κ. If it were 0, K would be infinite, and the merged layer would have to do exactly
what this client's layer does along that direction."""


def largest_step(form: str, mu: float) -> float:
    """The step size from which the steps of a form diverge for some projectors."""
    hold = mu / (1 + mu)
    return {"released": 2.0, "printed": (1 + 1 / hold) / 2, "anchored": 1 / hold}[form]


class Limit:
    """The sums of one layer, a client at a time, in float64."""

    def __init__(self, coefficients: Coefficients):
        self._coefficients = coefficients
        self._count = 0
        self._of_P, self._of_K = Sums(), Sums()

    def add(self, W: Tensor, P: Spectrum | Diagonal) -> None:
        c = self._coefficients

        def weight(s: Tensor) -> Tensor:
            return s * s if c.anchored else s / (c.follow - c.hold * s).clamp(min=CLOSEST * c.follow)

        self._count += 1
        self._of_K.add(W, P.map(weight))
        if not c.anchored:
            self._of_P.add(None, P)

    def matrix(self, start: Tensor) -> Tensor:
        """W∞ from the start W⁰."""
        K, WK = self._of_K.gram, self._of_K.product
        if self._coefficients.anchored:
            return start + K.divide(WK - K.after(start))
        share = self._coefficients.pull / self._count
        prior = self._of_P.gram.scaled(-share).plus_identity()
        return prior.plus(K.scaled(share)).solve(prior.after(start) + share * WK)
