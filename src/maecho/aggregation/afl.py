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
from torch import Tensor

from maecho.aggregation.average import average
from maecho.aggregation.method import Assembly, Guide, parts_of
from maecho.errors import UploadError
from maecho.linalg.means import as_working, has_mean
from maecho.linalg.sums.weighted import Sums
from maecho.network.layers import find
from maecho.options import NOT_NEGATIVE, number, one_of
from maecho.upload.merged import Merged
from maecho.upload.parted import Parted
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
        cost="one solve; memory of one layer of one upload",
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
        given = parts_of(uploads)
        first, made = given[0], Assembly(given[0])
        layer = find(first.layers, first.head)
        assert layer is not None  # an upload with targets has a head
        of_head = {layer.weight, layer.bias}
        for name in first.listed:
            if self.backbone == "shared" and name not in of_head and has_mean(first.listed[name]):
                made.put(name, _shared(given, name))
            else:
                made.put(name, average(given, name))
        sums, targets = Sums(), torch.zeros(())
        for upload in given:
            # Y_iᵀ X_i, projected on the directions that the Gram holds.
            G = upload.statistics["gram"][layer.name]
            sums.add(None, G.held())
            targets = targets + G.onto(upload.statistics["targets"].double().unsqueeze(0))
        gram = sums.gram
        if gram.known:
            solved = gram.plus_identity(self.ridge * gram.mean_eigenvalue).divide(targets)
            made.put_matrix(layer, solved)
        return made.result()


def _shared(uploads: Sequence[Parted], name: str) -> Tensor:
    """The tensor that all clients share. Raises UploadError if one has another."""
    first = uploads[0]
    shared = first.weights[name]
    for upload in uploads[1:]:
        own = upload.weights[name]
        if not torch.equal(shared, own):
            gap = float((as_working(shared) - as_working(own)).abs().max())
            raise UploadError(
                f"{upload.client}: afl needs a backbone that all clients share, so weight {name!r} must be as in "
                f"{first.client}, got one that differs by {gap:.3g}; backbone='average' merges all the same"
            )
    return shared
