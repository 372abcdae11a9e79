"""Matched averaging: every client's neurons are assigned to global neurons, and those with one assignment are averaged.

The model is the Beta-Bernoulli process of Yurochkin et al. (PFNM, ICML 2019). Global neurons are θ ~ N(0, σ0²). Each
client has some of them, with noise N(0, σ²). The data decide how many there are. Let the assignments of all other
clients be fixed. Say m_i of them have a neuron at global neuron i, and these neurons have the sum S_i. To assign client
j's neuron v to i then gains

    ‖(S_i + v)/σ²‖² / (1/σ0² + (m_i + 1)/σ²) − ‖S_i/σ²‖² / (1/σ0² + m_i/σ²) + 2 log(m_i / (J − m_i))

with J clients. To make v the k-th new global neuron gains the same with S = 0 and m = 0, and with 2 log(γ/J) − 2 log k
as the last term. The Hungarian algorithm finds the best assignment. Clients take turns until nothing changes. Layers
are matched in order of execution, and may grow. For fully connected networks this is PFNM. With convolutions it is
FedMA (Wang et al., ICLR 2020) in its one-shot form.

Under this model small neurons may be likelier new than matched, even to their equals, and clients of one model would
grow. So a neuron that equals a global one is that one. PFNM then takes the most probable θ of every global neuron,

    Σ v/σ² / (1/σ0² + m/σ²),

for the incoming weights, the bias and the outgoing weights of its m neurons v; FedMA takes their mean. The first pulls
neurons that few clients have to 0, and all others a little. So it gives the common model of equal clients back only up
to that factor, m / (m + σ²/σ0²) for each layer. Of a single client there is nothing to pool, and it is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from maecho.aggregation.method import Guide
from maecho.alignment.transport import Alignment, rows_of
from maecho.errors import InputError
from maecho.linalg.means import has_mean
from maecho.network.spaces import Space, carry
from maecho.options import POSITIVE, number, one_of
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EQUAL = 1e-6
"""Neurons that differ by no more than this share of their norm are equal."""
SWEEPS = 10
"""The most turns that a client gets. Assignments mostly settle after two or three."""


def assign(
    neurons: Sequence[Float[np.ndarray, "own features"]], sigma0: float, sigma: float, gamma: float, most: int
) -> list[Int[np.ndarray, " own"]]:
    """Assign to every neuron of every client a global neuron. There are at most `most` global neurons."""
    from scipy.optimize import linear_sum_assignment

    J, features = len(neurons), neurons[0].shape[1]
    sums, counts = np.zeros((0, features)), np.zeros(0)
    found: list[Int[np.ndarray, " own"]] = []
    for sweep in range(SWEEPS):
        changed = False
        for j, own in enumerate(neurons):
            if sweep:
                np.subtract.at(sums, found[j], own)
                np.subtract.at(counts, found[j], 1)
                keep = counts > 0
                renumbered = np.cumsum(keep) - 1
                found = [renumbered[f] if i != j else f for i, f in enumerate(found)]
                sums, counts = sums[keep], counts[keep]
            gain = _gains(own, sums, counts, J, sigma0, sigma, gamma, min(len(own), max(0, most - len(counts))))
            _, chosen = linear_sum_assignment(gain, maximize=True)
            # New global neurons are interchangeable. They follow the client's order, so the first client keeps its own.
            fresh = np.flatnonzero(chosen >= len(counts))
            chosen[fresh] = len(counts) + np.arange(len(fresh))
            sums = np.vstack([sums, np.zeros((len(fresh), features))])
            counts = np.append(counts, np.zeros(len(fresh)))
            np.add.at(sums, chosen, own)
            np.add.at(counts, chosen, 1)
            if sweep:
                changed |= not np.array_equal(chosen, found[j])
                found[j] = chosen
            else:
                found.append(chosen)
        if sweep and not changed:
            break
    return found


def _gains(
    own: np.ndarray, sums: np.ndarray, counts: np.ndarray, J: int, sigma0: float, sigma: float, gamma: float, new: int
) -> np.ndarray:
    """The gain of assigning each of a client's neurons to each global neuron that exists, and to `new` further ones."""
    a, b = 1 / sigma0**2, 1 / sigma**2
    square = (own**2).sum(1, keepdims=True)
    joint = square + 2 * own @ sums.T + (sums**2).sum(1)
    there = b**2 * joint / (a + (counts + 1) * b) - b**2 * (sums**2).sum(1) / (a + counts * b)
    there = there + 2 * np.log(counts / np.maximum(J - counts, 1e-10))
    fresh = b**2 * square / (a + b) + 2 * np.log(gamma / J) - 2 * np.log(np.arange(1, new + 1))
    gains = np.hstack([there, np.broadcast_to(fresh, (len(own), new))])
    equal = np.zeros(gains.shape, dtype=bool)
    # The difference itself is computed where the norms leave the question open, since squares of differences cancel.
    means = sums / np.maximum(counts, 1)[:, None]
    near = np.isclose(square, (means**2).sum(1), rtol=3 * EQUAL, atol=0)
    for row in np.flatnonzero(near.any(1)):
        gaps = np.linalg.norm(means[near[row]] - own[row], axis=1)
        equal[row, np.flatnonzero(near[row])] = gaps <= EQUAL * np.sqrt(square[row])
    return np.where(equal, len(own) * (1 + np.ptp(gains)) + gains, gains) if equal.any() else gains


@dataclass(frozen=True)
class FedMA(Alignment):
    """Layer-wise matched averaging, without training between layers.

    It has the options of `Alignment` except `transport` and `metric`, and these:

    Args:
        sigma0: σ0, the spread of the global neurons.
        sigma: σ, the spread of the clients' neurons around them.
        gamma: γ. A larger value gives the global layers more neurons.
        growth: the largest width of a global layer, as a multiple of the clients' width. 1 keeps the architecture.
        estimate: the weights of a global neuron: the "mean" of the neurons that were assigned to it, or its "map"
            estimate, the most probable weights under the priors, as in the paper of PFNM.
    """

    guide: ClassVar[Guide] = Guide(
        does="matches neurons as `pfnm` does, at every kind of layer that allows it; by default widths stay",
        uploads="neuron spaces (found by tracing)",
        different="with similar data",
        convolutions="yes",
        residual="yes",
        cost="seconds; memory of all uploads",
        when="as `ot`, with more than two clients and none whose order should count",
    )

    sigma0: float = 1.0
    sigma: float = 1.0
    gamma: float = 7.0
    growth: float = 1.0
    estimate: Literal["mean", "map"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("metric", self.metric, ("weights",))
        for name in ("sigma0", "sigma", "gamma"):
            number(name, getattr(self, name), POSITIVE, 0)
        number("growth", self.growth, "at least 1 and finite", 1)
        one_of("estimate", self.estimate, ("mean", "map"))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        # A greedy assignment depends on who comes first. The largest client does, whatever the order of the uploads.
        given = sorted(uploads, key=lambda upload: (-upload.examples, upload.client))
        spaces = self._spaces(given)
        weights = [dict(upload.weights) for upload in given]
        present = [{n: t.new_ones(1, dtype=torch.float64) for n, t in upload.weights.items()} for upload in given]
        axes = {(place.tensor, place.axis) for space in spaces for place in space.places}
        widths = {}
        for space in spaces:
            found = self._assign(given, weights, space, axes)
            axes -= {(place.tensor, place.axis) for place in space.places}
            widths[space.name] = width = int(max(f.max() for f in found)) + 1
            for f, own, there in zip(found, weights, present, strict=True):
                M = torch.zeros(width, space.size, dtype=torch.float64)
                M[torch.from_numpy(f), torch.arange(space.size)] = 1
                M = M.to(own[space.places[0].tensor].device)
                for place in space.places:
                    shape = [1] * own[place.tensor].dim()
                    shape[place.axis] = -1
                    mask = M.sum(1).repeat_interleave(place.block).reshape(shape)
                    own[place.tensor] = carry(own[place.tensor], place, M)
                    there[place.tensor] = there[place.tensor] * mask
        matched = {place.tensor for space in spaces for place in space.places}
        return self._average(given, weights, present, widths, matched)

    def _assign(
        self,
        uploads: Sequence[Upload],
        weights: Sequence[dict[str, Tensor]],
        space: Space,
        open_axes: set[tuple[str, int]],
    ) -> list[np.ndarray]:
        rows = [own.cpu().numpy() for own in rows_of(uploads[0].layers, weights, space, open_axes)]
        # Divided by the spread of the neurons, so that the priors have the same meaning in every layer.
        scale = float(np.sqrt(np.mean([np.mean(r**2) for r in rows]))) or 1.0
        most = max(space.size, int(self.growth * space.size))
        return assign([r / scale for r in rows], self.sigma0, self.sigma, self.gamma, most)

    def _average(
        self,
        uploads: Sequence[Upload],
        weights: Sequence[dict[str, Tensor]],
        present: Sequence[dict[str, Tensor]],
        widths: dict[str, int],
        matched: set[str],
    ) -> Merged:
        """Estimate every entry from the clients that have it."""
        largest = uploads[0].weights
        of_neurons = matched & {part for layer in uploads[0].layers for part in (layer.weight, layer.bias)}
        prior = (self.sigma / self.sigma0) ** 2 if self.estimate == "map" and len(uploads) > 1 else 0.0
        out = {}
        for name, like in largest.items():
            if not has_mean(like):
                out[name] = like.clone()
                continue
            total = sum(own[name].to(torch.promote_types(like.dtype, torch.float64)) for own in weights)
            count = sum(there[name] for there in present)
            assert isinstance(total, Tensor)
            assert isinstance(count, Tensor)
            out[name] = (total / (count.clamp(min=1) + (prior if name in of_neurons else 0))).to(like.dtype)
        merged = Merged(uploads[0].model_state(out), averaged=uploads[0].model_names(largest))
        merged.widths = widths
        return merged


@dataclass(frozen=True)
class PFNM(FedMA):
    """Probabilistic federated neural matching, for fully connected networks. Global layers may grow."""

    guide: ClassVar[Guide] = Guide(
        does=(
            "assigns the neurons of all clients to common neurons, as many as the data ask for, then takes the most "
            "probable weights; the network may grow"
        ),
        uploads="neuron spaces (found by tracing)",
        different="yes, by growing",
        convolutions="no",
        residual="no",
        cost="seconds; memory of all uploads",
        when="MLPs, if a wider network is welcome",
    )

    growth: float = 2.0
    estimate: Literal["mean", "map"] = "map"

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        wrong = self.complaint(uploads[0])
        if wrong:
            raise InputError(wrong)
        return super().__call__(uploads)

    @staticmethod
    def complaint(upload: Upload) -> str:
        """Why uploads of this network cannot be merged so; empty if they can."""
        layer = next((layer for layer in upload.layers if not layer.dense), None)
        return f"pfnm is for fully connected networks, got the layer {layer.name!r}; use fedma" if layer else ""
