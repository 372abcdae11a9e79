"""The statistic "gradients": B = Σ g gᵀ over the gradients g of log p(y | x) at every layer's outputs.

With the Gram matrix as A, A ⊗ B approximates the Fisher information of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from maecho import devices
from maecho.linalg.leading import leading
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import add_into
from maecho.network import kinds
from maecho.network.layers import Layer
from maecho.statistics.of_gradients import BackwardGatherer, Batch, Deltas
from maecho.statistics.of_layers import OfLayers, widths
from maecho.statistics.statistic import Found, Gatherer, Options, Setting


class Gradients(OfLayers):
    """One matrix for each layer, as wide as the layer's outputs."""

    name = "gradients"
    reveals = (
        "Directions in which a layer's outputs would change the model's answers on the data. At the last layer these "
        "say which classes the model confuses; with labels='observed', which labels it gets wrong."
    )
    additive = True
    of_outputs = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Sums()

    def recipe(self, options: Options) -> str:
        return f"sum of g gᵀ over the gradients g of log p(y|x) at the layer's outputs, labels {options.labels}"


class _Sums(BackwardGatherer):
    """Sums up g gᵀ of every layer, in float64."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def see_gradients(self, batch: Batch, deltas: Deltas, sums: Mapping[str, Tensor | None] | None) -> None:
        for call in batch.calls:
            delta = deltas[id(call)]
            if delta is not None:
                g = devices.double(kinds.output_rows(call.module, delta))
                add_into(self._found, call.layer.name, g.mT @ g)

    def value(self, found: Found) -> dict[str, Spectrum]:
        self.check_gathered()
        return {layer.name: self._matrix(layer, found) for layer in found.layers}

    def _matrix(self, layer: Layer, found: Found) -> Spectrum:
        if layer.name in self._found:
            return leading(self._found[layer.name].cpu(), found.enough(widths(found, of_outputs=True)))
        groups, out, _ = layer.shape(found.weights)
        return Spectrum.zero(groups, out)
