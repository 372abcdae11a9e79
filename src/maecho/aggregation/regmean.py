"""RegMean: the layer that comes closest to every client's layer on that client's own inputs.

    min_W  Σ_i ‖(W − W_i) X_iᵀ‖²   =>   W = (Σ_i W_i G_i) (Σ_i G_i)⁻¹,    G_i = X_iᵀ X_i

(Jin et al., ICLR 2023), with a ridge towards the average, and off-diagonal entries of G_i shrunk as in the paper. Only
sums over clients are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from maecho.aggregation.average import Mean
from maecho.linalg.symmetric import Total, add_into
from maecho.options import NOT_NEGATIVE, number
from maecho.upload.merged import Merged, assemble
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class RegMean:
    """Args:
    ridge: pull towards the average, as a share of the mean eigenvalue of Σ G_i. 0: the average stands only where no
        client has inputs.
    shrink: what off-diagonal entries of the Grams are multiplied with, in [0, 1].
    """

    ridge: float = 1e-3
    shrink: float = 1.0

    def __post_init__(self) -> None:
        number("ridge", self.ridge, NOT_NEGATIVE, 0)
        number("shrink", self.shrink, "in [0, 1]", 0, 1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"gram"})

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        mean, first = Mean(), None
        grams: dict[str, Total] = {}
        products: dict[str, Tensor] = {}
        for upload in uploads:
            first = first or upload
            mean.add(upload)
            for layer in upload.layers:
                G = upload.statistics["gram"][layer.name].total().shrunk(self.shrink)
                add_into(products, layer.name, G.after(layer.matrix(upload.weights).double()))
                add_into(grams, layer.name, G)
        assert first is not None
        weights = mean.weights()
        merged = {}
        for layer in first.layers:
            G, average = grams[layer.name], layer.matrix(weights)
            gap = products[layer.name] - G.after(average)
            merged[layer.name] = average + G.plus_identity(self.ridge * G.mean_eigenvalue).divide(gap)
        silent = [name for name, G in grams.items() if not G.known]
        return assemble(first, weights, merged, silent)
