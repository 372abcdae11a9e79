"""Fisher merging: every single weight averaged by how much it matters to each client.

    min_W  Σ_i Σ_k F_ik (W_k − W_ik)²   =>   W = (Σ_i F_i ∘ W_i + ε W̄) / (Σ_i F_i + ε)

(Matena and Raffel, NeurIPS 2022.) F_i is the diagonal of client i's Fisher information, W̄ the average, ε a pull towards
it. F_i is a sum over the client's examples, not a mean. So the sum over clients is the precision of the product of
their Laplace posteriors, and a client with twice the examples counts twice. Only sums over clients are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from maecho.aggregation.average import average, averages, count_of
from maecho.aggregation.method import Assembly, Guide, parts_of
from maecho.errors import UploadError
from maecho.linalg.means import Piece, RunningMean, as_working, pieces, working
from maecho.options import NOT_NEGATIVE, number, one_of
from maecho.upload.cohort import in_memory
from maecho.upload.merged import Merged
from maecho.upload.parted import Parted
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
        given, held = parts_of(uploads), in_memory(uploads)
        first, known = given[0], list(given[0].statistics["fisher"])
        for upload in given:
            _check_names(first, upload)
        made = Assembly(first)
        means = averages(held, self.weighting) if held else {}
        for name in first.listed:
            if name not in known:
                made.put(name, means[name] if held else average(given, name, self.weighting))
        informed = set()
        for name, wanted, F in self._followed(held, known) if held else self._read(given, known, means):
            if self._pull(means[name], wanted, F):
                informed.add(name)
            made.put(name, means.pop(name), own=True)
        merged = made.result()
        merged.averaged = tuple(first.model_names(name for name in first.listed if name not in informed))
        return merged

    def _read(
        self, given: list[Parted], names: list[str], means: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """As `_followed`, with one tensor of one upload after the other. The plain mean goes into `means`."""
        for name in names:
            plain, followed = RunningMean(), RunningMean()
            for upload in given:
                W, F = upload.weights[name], upload.statistics["fisher"][name]
                plain.add([as_working(W)], count_of(upload, self.weighting))
                followed.add([W.to(_dtype(W, F))], [self._weight(upload, F, _dtype(W, F))])
            (mean,), _ = plain.result()
            (wanted,), totals = followed.result()
            means[name] = mean.to(W.dtype, copy=True)
            yield name, wanted, _tensors(totals)[0]

    def _parts(self, upload: Upload, pieces: Iterable[Piece]) -> tuple[list[Tensor], list[Tensor]]:
        """Pieces of a client's weights and of its Fisher information, in the dtype to compute in."""
        weights, fishers = [], []
        for piece in pieces:
            W, F = piece.of(upload.weights[piece.name]), piece.of(upload.statistics["fisher"][piece.name])
            weights.append(W.to(_dtype(W, F)))
            fishers.append(self._weight(upload, F, _dtype(W, F)))
        return weights, fishers

    def _weight(self, upload: Upload | Parted, F: Tensor, dtype: torch.dtype) -> Tensor:
        return F.to(dtype) if self.weighting == "examples" else F.to(dtype) / upload.examples

    def _followed(self, held: list[Upload], names: list[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of each parameter: its name, Σ F_i W_i / Σ F_i, and Σ F_i. A few numbers of all uploads are looked at
        together, so that beside the result there is memory for one tensor."""
        own = {n: [t for u in held for t in (u.weights[n], u.statistics["fisher"][n])] for n in names}
        buffers: dict[str, tuple[Tensor, Tensor]] = {}
        for together in pieces(own, at_once=2):
            for piece in together:
                if piece.whole or not piece.begin:
                    W, F = own[piece.name][:2]
                    made = torch.empty_like(W, dtype=_dtype(W, F))
                    buffers[piece.name] = made, (made if piece.whole else torch.empty_like(made))
            running = RunningMean([piece.of(buffers[piece.name][0]) for piece in together])
            for upload in held:
                running.add(*self._parts(upload, together))
            means, totals = running.result()
            for piece, mean, total in zip(together, means, _tensors(totals), strict=True):
                name = piece.name
                if piece.whole:
                    del buffers[name]
                    yield name, mean, total
                    continue
                for buffer, value in zip(buffers[name], (mean, total), strict=True):
                    place = piece.of(buffer)
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
                if piece.end == own[name][0].numel():
                    yield name, *buffers.pop(name)

    def _pull(self, average: Tensor, wanted: Tensor, F: Tensor) -> bool:
        """Move an average towards what the information wants: W = W̄ + Σ F / (Σ F + ε) · (wanted − W̄). Says whether
        there was any information."""
        known = float(F.sum())
        if not math.isfinite(known):  # too large for the dtype of F
            known = float(F.sum(dtype=torch.float64))
        ridge = self.ridge * known / max(1, F.numel())
        for piece in (piece for some in pieces({"": [average, wanted, F]}, at_once=2) for piece in some):
            W, own = piece.of(average), piece.of(F)
            share = (own / (own + ridge)).nan_to_num_(0.0)
            if W.dtype is own.dtype:
                W.lerp_(piece.of(wanted), share)
            else:
                W.copy_(torch.lerp(W.to(own.dtype), piece.of(wanted), share))
        return known > 0


def _dtype(W: Tensor, F: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.promote_types(working(W.dtype), F.dtype)


def _tensors(weights: float | Sequence[Tensor]) -> Sequence[Tensor]:
    assert not isinstance(weights, float)
    return weights


def _check_names(first: Parted, upload: Parted) -> None:
    """All clients must have Fisher information of the same parameters."""
    for name in sorted(first.statistics["fisher"].keys() ^ upload.statistics["fisher"].keys()):
        expected, got = ("one", "none") if name in first.statistics["fisher"] else ("none", "one")
        raise UploadError(f"{upload.client}: fisher of {name!r}: expected {expected} as in {first.client}, got {got}")
