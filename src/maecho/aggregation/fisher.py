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

from maecho.aggregation.average import add_product, average, shares
from maecho.aggregation.method import Assembly, Guide, parts_of
from maecho.errors import UploadError
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
        cost="one pass; memory of one layer of one upload",
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
        given = parts_of(uploads)
        first, known = given[0], given[0].statistics["fisher"].keys()
        for upload in given:
            for name in sorted(known ^ upload.statistics["fisher"].keys()):
                expected, got = ("one", "none") if name in known else ("none", "one")
                raise UploadError(
                    f"{upload.client}: fisher of {name!r}: expected {expected} as in {first.client}, got {got}"
                )
        made, informed = Assembly(first), set[str]()
        for name in first.listed:
            if name not in known:
                made.put(name, average(given, name, self.weighting))
                continue
            sums: dict[str, Tensor] = {}
            for upload, p in zip(given, shares(given, self.weighting), strict=True):
                W, F = upload.weights[name], upload.statistics["fisher"][name]
                factor = 1 if self.weighting == "examples" else 1 / upload.examples
                add_product(sums, "W", W, p)
                add_product(sums, "F", F, factor)
                if "WF" not in sums:
                    sums["WF"] = torch.zeros_like(sums["F"])
                sums["WF"].addcmul_(W, F, value=factor)  # in float64, as the sum is
            W, F = sums["W"], sums["F"]
            total = F + self.ridge * F.mean()
            there = total > 0
            gap = sums["WF"] - W * F
            made.put(name, W + torch.where(there, gap / total.where(there, torch.ones_like(total)), 0))
            if bool(F.any()):
                informed.add(name)
        merged = made.result()
        merged.averaged = tuple(name for name in first.listed if name not in informed)
        return merged
