"""Corrects drawn inputs at a layer of whose features the client has uploaded moments.

Inputs drawn by mean and covariance are no pictures, and a network's features of them are not those of pictures: f, the
client's features of a drawn input, have neither the mean nor the spread of its real ones. So f is exchanged for f'
drawn from the uploaded moments, and the merged network's features h of the same input follow:

    h' = h + M (f' − f),   M = D + (Σ h fᵀ − D Σ f fᵀ)(Σ f fᵀ + εI)⁻¹

with sums over drawn inputs, centred. D has one number a feature; M is D where the two networks agree neuron by neuron.
The part of h that does not depend on f stays as it was drawn. M is as wide as the layer, so it needs more draws than
the layers themselves, and then little ridge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from maecho.linalg.gaussians import NO_CLASS, Gaussians
from maecho.linalg.symmetric import Dense
from maecho.network.attention import slow_path
from maecho.network.forward import call
from maecho.network.hooks import Enough, ending_early, watching
from maecho.progress import track
from maecho.synthesis.pseudo import PseudoInputs, draw

if TYPE_CHECKING:
    from jaxtyping import Float


MAP_DRAWS = 4
"""How many times as many inputs are drawn for M as for the layers."""
MAP_RIDGE = 0.1
"""The ridge of M, as a share of the ridge of the layers."""


class Correction:
    """Drawn inputs of one client, which can be read any number of times. Inside `applied` their features are corrected.

    Args:
        inputs: drawn from moments of the raw inputs.
        layer: the layer whose inputs are the features.
        features: moments of the features.
        seed: of the features that are drawn.
        ridge: as of Regression.
        follow: M, if it is known already.
        progress: whether to show a bar while M is fitted.
    """

    def __init__(
        self,
        inputs: PseudoInputs,
        layer: str,
        features: Gaussians,
        seed: int,
        ridge: float,
        follow: Float[Tensor, "d d"] | None = None,
        progress: bool | None = False,
    ):
        self.layer, self.follow = layer, follow
        self._inputs, self._features, self._seed, self._ridge = inputs, features, seed, ridge
        self._groups = {label: k for k, label in enumerate(features.classes.tolist())}
        self._rng = torch.Generator()
        self._label = NO_CLASS
        self._progress = progress

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        self._rng.manual_seed(self._seed)
        for x, labels in self._inputs:
            self._label = NO_CLASS if labels is None else int(labels[0])  # a chunk is of one class
            yield x, labels

    @contextlib.contextmanager
    def applied(self, own: nn.Module, merged: nn.Module) -> Iterator[None]:
        """Inside, every drawn input that runs through a client's network and then through the merged one."""
        if self.follow is None:
            self.follow = self.map(own, merged).to(self._inputs.dtype)
        follow = self.follow.mT
        moved = torch.zeros(0)

        def redraw(name: str, module: nn.Module, f: Tensor) -> Tensor:
            nonlocal moved
            drawn = draw(self._features, self._groups[self._label], len(f), self._rng, f.dtype).to(f.device)
            moved = drawn - f
            return drawn

        def correct(name: str, module: nn.Module, h: Tensor) -> Tensor:
            return h + moved @ follow

        with watching(own, [self.layer], redraw), watching(merged, [self.layer], correct):
            yield

    @torch.no_grad()
    def map(self, own: nn.Module, merged: nn.Module) -> Float[Tensor, "d d"]:
        """M. What comes before the layer must be settled."""
        n, sums, gram, cross = 0, [torch.zeros(0)] * 2, torch.zeros(0), torch.zeros(0)
        more = replace(self._inputs, draws=MAP_DRAWS * self._inputs.draws)
        for x, _ in track(more, f"features at {self.layer}", show=self._progress):
            f, h = (self._reaching(network, x) for network in (own, merged))
            if not n:
                d = f.shape[1]
                sums = [f.new_zeros(d, dtype=torch.float64) for _ in "fh"]
                gram, cross = f.new_zeros(2, d, d, dtype=torch.float64)
            n += len(f)
            sums = [sums[0] + f.sum(0, dtype=torch.float64), sums[1] + h.sum(0, dtype=torch.float64)]
            # Products of a chunk in the network's own precision: what draws leave open is far more than that.
            gram += f.mT @ f
            cross += h.mT @ f
        gram -= torch.outer(sums[0], sums[0]) / n
        cross -= torch.outer(sums[1], sums[0]) / n
        varies = gram.diagonal() > 0
        same = torch.where(varies, cross.diagonal() / gram.diagonal().where(varies, torch.ones_like(sums[0])), 1.0)
        total = Dense(gram.unsqueeze(0))
        gap = (cross - same[:, None] * gram).unsqueeze(0)
        return same.diag() + total.plus_identity(total.ridge(MAP_RIDGE * self._ridge, n)).divide(gap)[0]

    def _reaching(self, network: nn.Module, x: Tensor) -> Tensor:
        found: list[Tensor] = []

        def keep(name: str, module: nn.Module, features: Tensor) -> None:
            found.append(features)
            raise Enough

        device = next((p.device for p in network.parameters()), torch.device("cpu"))
        with slow_path(), ending_early(), watching(network, [self.layer], keep):
            call(network, x, device)
        return found[0]
