"""RegMean: the layer that comes closest to every client's layer on that client's own inputs.

    min_W  Σ_i ‖(W − W_i) X_iᵀ‖²   =>   W = (Σ_i W_i G_i) (Σ_i G_i)⁻¹,    G_i = X_iᵀ X_i

(Jin et al., ICLR 2023.) A ridge pulls towards the average. The entries of G_i off the diagonal can be made smaller, as
in the paper. Only sums over clients are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from maecho.aggregation.average import Mean
from maecho.aggregation.method import Guide, assemble
from maecho.linalg.symmetric import Total, add_into
from maecho.options import NOT_NEGATIVE, number
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class RegMean:
    """Least squares on all clients' inputs, layer by layer.

    Args:
        ridge: the pull towards the average, as a share of the mean eigenvalue of Σ G_i along the data. For the constant
            input of a bias it is that share of its own entry, so the result does not depend on units. With 0, the
            average is taken only where no client has inputs.
        shrink: the factor for off-diagonal entries of the Grams, in [0, 1].
    """

    guide: ClassVar[Guide] = Guide(
        does="finds the layer that is closest to every client's layer on that client's own inputs, in closed form",
        uploads="Grams",
        different="yes",
        convolutions="yes",
        residual="yes",
        cost="one solve a layer; memory of one upload",
        when="first, if the server does not have the network itself",
    )

    ridge: float = 1e-3
    shrink: float = 1.0

    def __post_init__(self) -> None:
        number("ridge", self.ridge, NOT_NEGATIVE, 0)
        number("shrink", self.shrink, "in [0, 1]", 0, 1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"gram"})

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        mean = Mean()
        grams: dict[str, Total] = {}
        products: dict[str, Tensor] = {}
        for upload in uploads:
            mean.add(upload)
            for layer in upload.layers:
                G = upload.statistics["gram"][layer.name].total().shrunk(self.shrink)
                add_into(products, layer.name, G.after(layer.matrix(upload.weights).double()))
                add_into(grams, layer.name, G)
        first, weights = mean.first, mean.weights()
        merged = {}
        for layer in first.layers:
            G, average = grams[layer.name], layer.matrix(weights)
            gap = products[layer.name] - G.after(average)
            merged[layer.name] = average + G.plus_identity(self.ridge * G.mean_eigenvalue).divide(gap)
        silent = [name for name, G in grams.items() if not G.known]
        return assemble(first, weights, merged, silent)
