"""Fisher merging: every single weight averaged by how much it matters to each client.

    min_W  Σ_i Σ_k F_ik (W_k − W_ik)²   =>   W = (Σ_i F_i ∘ W_i + ε W̄) / (Σ_i F_i + ε)

(Matena and Raffel, NeurIPS 2022.) F_i is the diagonal of client i's Fisher information, W̄ the average, ε a pull towards
it. F_i is a sum over the client's examples, not a mean. So the sum over clients is the precision of the product of
their Laplace posteriors, and a client with twice the examples counts twice. Only sums over clients are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from maecho.aggregation.average import Mean
from maecho.aggregation.method import Guide, assemble
from maecho.errors import UploadError
from maecho.linalg.symmetric import add_into
from maecho.options import NOT_NEGATIVE, number, one_of
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class Fisher:
    """The average of every weight, weighted by Fisher information.

    Args:
        ridge: ε, the pull towards the average, as a share of the mean entry of Σ F_i in the same tensor. With 0, the
            average is taken only where no client has information.
        weighting: "examples" takes F_i as it is, a sum over the client's examples. "uniform" divides it by their
            number, as in the paper, so that all clients count alike.
    """

    guide: ClassVar[Guide] = Guide(
        does="averages every single weight by how much it matters to each client's answers",
        uploads="`fisher`, as large as the weights (needs backward passes at the client)",
        different="no",
        convolutions="yes",
        residual="yes",
        cost="one pass; memory of one upload",
        when="models from one initialisation; networks with many parameters that are not matrices",
    )

    ridge: float = 1e-3
    weighting: Literal["examples", "uniform"] = "examples"

    def __post_init__(self) -> None:
        number("ridge", self.ridge, NOT_NEGATIVE, 0)
        one_of("weighting", self.weighting, ("examples", "uniform"))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"fisher"})

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        mean = Mean(self.weighting)
        fishers: dict[str, Tensor] = {}
        products: dict[str, Tensor] = {}
        for upload in uploads:
            mean.add(upload)
            first = mean.first
            for name in sorted(first.statistics["fisher"].keys() ^ upload.statistics["fisher"].keys()):
                expected, got = ("one", "none") if name in first.statistics["fisher"] else ("none", "one")
                raise UploadError(
                    f"{upload.client}: fisher of {name!r}: expected {expected} as in {first.client}, got {got}"
                )
            for name, one in upload.statistics["fisher"].items():
                F = one.double() / (1 if self.weighting == "examples" else upload.examples)
                WF = upload.weights[name].double() * F
                add_into(fishers, name, F)
                add_into(products, name, WF)
        first, weights = mean.first, mean.weights()
        for name, F in fishers.items():
            total = F + self.ridge * F.mean()
            known = total > 0
            gap = products[name] - weights[name] * F
            weights[name] = weights[name] + torch.where(known, gap / total.where(known, torch.ones_like(total)), 0)
        merged = assemble(first, weights, {})
        unknown = (name for name in first.weights if name not in fishers or not fishers[name].any())
        merged.averaged = tuple(first.model_names(unknown))
        return merged
