"""Corrects the features of drawn inputs at one layer, with the moments of real features that the client has uploaded.

Inputs drawn from a mean and a covariance are not real pictures. So the client's features f of a drawn input have
neither the mean nor the spread of its real features. They are replaced by f', drawn from the uploaded moments. The
features h that the merged network has for the same input are changed to fit:

    h' = h + M (f' − f),   M = D + (Σ h fᵀ − D Σ f fᵀ)(Σ f fᵀ + εI)⁻¹

The sums are centred and run over drawn inputs. D is diagonal. If the two networks agree neuron by neuron, M is D. The
part of h that does not depend on f stays as it was drawn. M is as wide as the layer. So fitting it takes more draws
than fitting the layers, and with more draws it needs less ridge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.linalg.finite import is_finite
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
"""Fitting M takes this many times the draws of the layers."""
MAP_RIDGE = 0.1
"""The ridge for M is this share of the ridge for the layers."""


class Correction:
    """Drawn inputs of one client. They can be read any number of times. Inside `applied` their features are corrected.

    Args:
        inputs: inputs drawn from the moments of the raw inputs.
        layer: the layer whose inputs are the features.
        features: the moments of the features.
        seed: the seed for drawing features.
        ridge: the ridge of the layers, as in Regression.
        feature_map: M, if it is known already.
        progress: whether to show a bar while M is fitted.
        batches: the drawn inputs, if somebody keeps them. By default they are drawn anew in every pass.
    """

    def __init__(
        self,
        inputs: PseudoInputs,
        layer: str,
        features: Gaussians,
        seed: int,
        ridge: float,
        feature_map: Float[Tensor, "d d"] | None = None,
        progress: bool | None = False,
        batches: Iterable[tuple[Tensor, Tensor | None]] | None = None,
    ):
        self.layer, self.feature_map = layer, feature_map
        self._inputs, self._features, self._seed, self._ridge = inputs, features, seed, ridge
        self._groups = {label: k for k, label in enumerate(features.classes.tolist())}
        self._rng = torch.Generator()
        self._label = NO_CLASS
        self._progress, self._batches = progress, batches

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        self._rng.manual_seed(self._seed)
        for x, labels in self._inputs if self._batches is None else self._batches:
            self._label = NO_CLASS if labels is None else int(labels[0])  # a chunk is of one class
            yield x, labels

    @contextlib.contextmanager
    def applied(self, own: nn.Module, merged: nn.Module) -> Iterator[None]:
        """Inside, the features of every drawn input are corrected. The input must run through the client's own network
        first, and then through the merged one."""
        if self.feature_map is None:
            self.feature_map = self.fit_map(own, merged).to(self._inputs.dtype)
        transposed = self.feature_map.mT
        difference = torch.zeros(0)

        def redraw(name: str, module: nn.Module, f: Tensor) -> Tensor:
            nonlocal difference
            drawn = draw(self._features, self._groups[self._label], len(f), self._rng, f.dtype).to(f.device)
            difference = drawn - f
            return drawn

        def correct(name: str, module: nn.Module, h: Tensor) -> Tensor:
            return h + (difference.to(transposed.dtype) @ transposed).to(h.dtype)

        with watching(own, [self.layer], redraw), watching(merged, [self.layer], correct):
            yield

    @torch.no_grad()
    def fit_map(self, own: nn.Module, merged: nn.Module) -> Float[Tensor, "d d"]:
        """Fit M. All layers before this one must have their final weights."""
        n, sums, gram, cross = 0, [torch.zeros(0)] * 2, torch.zeros(0), torch.zeros(0)
        more = replace(self._inputs, draws=MAP_DRAWS * self._inputs.draws)
        for x, _ in track(more, f"features at {self.layer}", show=self._progress):
            f, h = (self._features_of(network, x) for network in (own, merged))
            if not n:
                d = f.shape[1]
                sums = [f.new_zeros(d, dtype=torch.float64) for _ in "fh"]
                gram, cross = f.new_zeros(2, d, d, dtype=torch.float64)
            n += len(f)
            sums = [sums[0] + f.sum(0, dtype=torch.float64), sums[1] + h.sum(0, dtype=torch.float64)]
            # Products of a chunk have the network's own precision: the error of random draws is far larger. Squares of
            # large inputs need a larger range.
            if f.element_size() < 4 or not is_finite(f.mT @ f + h.mT @ f):
                f, h = f.double(), h.double()
            gram += f.mT @ f
            cross += h.mT @ f
        gram -= torch.outer(sums[0], sums[0]) / n
        cross -= torch.outer(sums[1], sums[0]) / n
        varies = gram.diagonal() > 0
        same = torch.where(varies, cross.diagonal() / gram.diagonal().where(varies, torch.ones_like(sums[0])), 1.0)
        total = Dense(gram.unsqueeze(0))
        gap = (cross - same[:, None] * gram).unsqueeze(0)
        return same.diag() + total.plus_identity(total.ridge(MAP_RIDGE * self._ridge, n)).divide(gap)[0]

    def _features_of(self, network: nn.Module, x: Tensor) -> Tensor:
        """The inputs of the layer in this network."""
        found: list[Tensor] = []

        def keep(name: str, module: nn.Module, features: Tensor) -> None:
            found.append(features)
            raise Enough

        device = devices.of(network)
        with slow_path(), ending_early(), watching(network, [self.layer], keep):
            call(network, x, device)
        return found[0]
