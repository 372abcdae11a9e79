"""Kronecker-factored merging: each layer by how its client's loss curves in inputs and in outputs.

    min_W  Σ_i tr[(W − W_i)ᵀ B_i (W − W_i) A_i] / n_i   =>   Σ_i B_i W A_i / n_i = Σ_i B_i W_i A_i / n_i

(FedLPA: Liu et al., NeurIPS 2024; FedFisher: Jhunjhunwala et al., AISTATS 2024.) A_i = Σ x xᵀ runs over the inputs of
the layer, B_i = Σ g gᵀ over the gradients of log p(y|x) at its outputs, both over the client's n_i examples. If x and g
are independent, the client's Fisher information is Σ xxᵀ ⊗ ggᵀ ≈ n_i (A_i/n_i) ⊗ (B_i/n_i) = A_i ⊗ B_i / n_i. That
division keeps the Fisher information a sum over examples: a client with twice the data counts twice, where A_i ⊗ B_i
would count it four times. With B_i = n_i I it is RegMean.

Both factors of a client are damped: A_i + aI and B_i + bI. Without that, the smallest eigenvalues of A ⊗ B, which are
products of small eigenvalues of A and B, could not be told from 0 in float32. FedLPA's release adds 1 to the means over
examples, A_i / n_i and B_i / n_i. So in every direction each client pulls towards its own weights, at least in
proportion to n_i. In directions in which no client has information, the result is the average. A model that is sure has
small gradients, but it still counts by its inputs.

There is no closed form for more than one client. `linalg/sylvester.py` solves the equation iteratively, starting from
the average.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from maecho.aggregation.average import Mean
from maecho.aggregation.method import Guide, assemble
from maecho.aggregation.units import common_units
from maecho.linalg.grams import in_terms_of, in_terms_of_one, in_unit, mean_of_data
from maecho.linalg.spectra import Spectrum
from maecho.linalg.sylvester import Sylvester
from maecho.linalg.symmetric import Diagonal
from maecho.options import NOT_NEGATIVE, POSITIVE, number, one_of
from maecho.progress import track
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class Kronecker:
    """RegMean with both factors of the Fisher information.

    Args:
        damping: "released" adds 1 to the means over examples, so the result depends on the units of the data. A number
            gives a and b as a share of the mean eigenvalue of A_i along the data and of B_i. Then it does not.
        ridge: an additional pull towards the average, as a share of the mean eigenvalue of the damped Σ A_i ⊗ B_i /
            n_i. It helps if inputs are so large that a damping of 1 has no effect.
        weighting: "examples" takes the Fisher information as a sum over the client's examples. "uniform" divides it by
            their number, so that all clients count alike.
        tolerance: conjugate gradients stop when the residual is at most this share of the residual at the average.
        iterations: the most steps. If they do not suffice, a warning says how large the residual still is.
    """

    guide: ClassVar[Guide] = Guide(
        does="works as `regmean` and also weighs outputs: A ⊗ B of inputs and of gradients (FedLPA, FedFisher)",
        uploads="Grams and `gradients` (needs backward passes at the client)",
        different="yes",
        convolutions="yes",
        residual="yes",
        cost="conjugate gradients, seconds to minutes; memory of all uploads",
        when="few classes a client",
    )

    damping: float | Literal["released"] = "released"
    ridge: float = 1e-3
    weighting: Literal["examples", "uniform"] = "examples"
    tolerance: float = 1e-6
    iterations: int = 2000

    def __post_init__(self) -> None:
        number("ridge", self.ridge, NOT_NEGATIVE, 0)
        if self.damping != "released":
            number("damping", self.damping, "released, or at least 0 and finite", 0)
        one_of("weighting", self.weighting, ("examples", "uniform"))
        number("tolerance", self.tolerance, POSITIVE, 0, 1)
        number("iterations", self.iterations, "a whole number, at least 0", 0, whole=True)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"gram", "gradients"})

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        mean = Mean(self.weighting)
        # The released damping adds 1 to inputs in their own units, beside a constant that is 1.
        units = common_units(uploads, self.weighting)
        if self.damping == "released":
            units = {name: None if unit is None else torch.ones_like(unit) for name, unit in units.items()}
        equations: dict[str, Sylvester] = {}
        for upload in uploads:
            mean.add(upload)
            share = 1 / upload.examples ** (1 if self.weighting == "examples" else 2)
            for layer in upload.layers:
                A, B = upload.statistics["gram"][layer.name], upload.statistics["gradients"][layer.name]
                B = B.scaled(share)
                equation = equations.setdefault(layer.name, Sylvester())
                a, b = self._shift(A, upload.examples), self._shift(B, upload.examples * share)
                unit = units[layer.name]
                equation.add(in_terms_of(layer.matrix(upload.weights), unit), in_unit(A, unit), B, a, b)
        first, weights = mean.first, mean.weights()
        merged: dict[str, Tensor] = {}
        short: list[str] = []
        for layer in track(first.layers, "kronecker"):
            equation, unit = equations.pop(layer.name), units[layer.name]
            start = in_terms_of(layer.matrix(weights), unit)
            found = equation.solve(start, self.ridge, self.tolerance, self.iterations)
            if found.residual > self.tolerance:
                short.append(f"{found.residual:.2g} at {layer.name!r}")
            if found.known:
                merged[layer.name] = in_terms_of_one(found.matrix, unit)
        if short:
            warnings.warn(
                f"kronecker: every layer must come to a residual of {self.tolerance:g}, got {', '.join(short)} after "
                f"{self.iterations} iterations; raise iterations or damping",
                stacklevel=2,
            )
        return assemble(first, weights, merged)

    def _shift(self, A: Spectrum | Diagonal, released: float) -> float | Tensor:
        if self.damping == "released":
            return released
        return self.damping * mean_of_data(A)[:, None, None]
