"""AFL: the last layer by ridge regression on everybody's data, from sums alone.

    min_W  Σ_i ‖X_i Wᵀ − Y_i‖² + γ ‖W‖²   =>   W = (Σ_i Y_iᵀ X_i) (Σ_i X_iᵀ X_i + γI)⁻¹

(He et al., CVPR 2025.) X_i are the inputs of the last layer, with a bias as one more input that is always 1; Y_i are
the labels as unit rows. The sums do not depend on who holds which example, so any split of the data gives the same head
as all of it in one place. For that all clients must share everything before the head: a frozen, pretrained backbone.

The head is exact for uploads made with `rank=None`. Other uploads carry a Gram that is cut to its leading directions.
Then Y_iᵀ X_i is projected on these directions too: otherwise it would be divided by γ in the directions that the Gram
has lost. The mean eigenvalue of the lost directions, which the upload carries, is of no use here: Y_iᵀ X_i is largest
in directions with more than the mean, and they would get weights that are too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from maecho.aggregation.average import Mean
from maecho.aggregation.method import Guide, assemble
from maecho.errors import UploadError
from maecho.linalg.symmetric import Total, add_into
from maecho.options import NOT_NEGATIVE, number, one_of
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class AFL:
    """A new head for a backbone that all clients share.

    Args:
        ridge: γ, as a share of the mean eigenvalue of Σ XᵀX along the data. For the constant input of a bias it is that
            share of its own entry. The default is well above the rounding of float32 uploads. 0 is least squares (the
            solution of smallest norm, if there are several).
        backbone: "shared" refuses clients whose weights before the head differ. "average" averages these weights. Then
            the head is fitted to features of the clients' own weights, but gets those of the averaged weights.
    """

    guide: ClassVar[Guide] = Guide(
        does=(
            "fits a new head by ridge regression to the labels; it is exactly the head that all data in one place"
            " would give"
        ),
        uploads="Grams and `targets`, with `rank=None` to be exact",
        different="the backbone must be shared",
        convolutions="yes",
        residual="yes",
        cost="one solve; memory of one upload",
        when="clients that share a frozen, pretrained backbone",
    )

    ridge: float = 1e-3
    backbone: Literal["shared", "average"] = "shared"

    def __post_init__(self) -> None:
        number("ridge", self.ridge, NOT_NEGATIVE, 0)
        one_of("backbone", self.backbone, ("shared", "average"))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"gram", "targets"})

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        mean = Mean()
        grams: dict[str, Total] = {}
        targets = torch.zeros(())
        for upload in uploads:
            mean.add(upload)
            if self.backbone == "shared":
                _check_shared(mean.first, upload)
            assert upload.head is not None  # an upload with targets has one
            G = upload.statistics["gram"][upload.head]
            add_into(grams, upload.head, G.held().total())
            targets = targets + G.onto(upload.statistics["targets"].double().unsqueeze(0))
        first, weights = mean.first, mean.weights()
        (name, gram), *_ = grams.items()
        if not gram.known:
            return assemble(first, weights, {})
        return assemble(first, weights, {name: gram.plus_identity(self.ridge * gram.mean_eigenvalue).divide(targets)})


def _check_shared(first: Upload, upload: Upload) -> None:
    head: set[str | None] = {
        p for layer in first.layers if layer.name == first.head for p in (layer.weight, layer.bias)
    }
    for name, tensor in first.weights.items():
        if name not in head and tensor.is_floating_point() and not torch.equal(tensor, upload.weights[name]):
            gap = float((tensor.double() - upload.weights[name].double()).abs().max())
            raise UploadError(
                f"{upload.client}: afl needs a backbone that all clients share, so weight {name!r} must be as in "
                f"{first.client}, got one that differs by {gap:.3g}; backbone='average' merges all the same"
            )
