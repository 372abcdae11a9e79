"""The statistic "gram", the Gram matrix of every layer: G = Σ x xᵀ over the layer's inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maecho.formatting import names_of
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal, add_into
from maecho.network import kinds
from maecho.network.layers import Layer, complete
from maecho.statistics.of_layers import OfLayers, for_layers
from maecho.statistics.statistic import Carrier, Found, Gatherer, Options, Setting


class Gram(OfLayers):
    """One matrix for each layer. A bias counts as one more input that is always 1."""

    name = "gram"
    reveals = (
        "Sums of products of a layer's inputs. At the first layer these are pixels or features themselves: which occur "
        "together, and how strongly. With fewer examples than inputs, the span of the examples is known exactly."
    )
    by_default = additive = with_constant = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return GramSums(setting.client)

    def recipe(self, options: Options) -> str:
        return "sum of x xᵀ over the inputs x of the layer, a bias being one more input that is always 1"

    def warnings(self, value: Any, carrier: Carrier) -> list[str]:
        words = [layer for layer in carrier.layers if layer.one_hot and layer.name in value]
        named = ", ".join(f"{layer.name} ({layer.shape(carrier.weights)[2]:,})" for layer in words)
        tokens = [
            f"how often each token occurs in the data is in the Gram of {named}: it shows which rare words, such as "
            "names, occur"
        ]
        tokens = tokens if words else []
        thin = [n for n, gram in value.items() if isinstance(gram, Spectrum) and carrier.examples < gram.width]
        if not thin:
            return tokens
        return [
            *tokens,
            f"fewer examples ({carrier.examples}) than inputs at {names_of(thin)}: the Gram spans just those examples",
        ]


class GramSums(Gatherer):
    """Sums up x xᵀ of each layer, in float64. For one-hot rows it counts tokens, which are the diagonal."""

    def __init__(self, client: str) -> None:
        self._client = client
        self._dense: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        x = x.detach()
        x = x.unsqueeze(0) if kinds.unbatched(module, x) else x
        for piece in x.split(kinds.examples_at_once(module, x)):
            found = kinds.rows(module, piece)
            if found.is_floating_point():
                found = complete(found, layer)
                add_into(self._dense, layer.name, found.mT @ found)
            else:
                counts = found[0].bincount(minlength=kinds.inputs(module)).double()
                add_into(self._counts, layer.name, counts.unsqueeze(0).cpu())

    def matrix(self, layer: Layer, found: Found) -> Spectrum | Diagonal:
        """The Gram matrix of one layer. It has rank 0 if nothing reached the layer."""
        groups, _, d = layer.shape(found.weights)
        if layer.one_hot:
            return Diagonal(self._counts[layer.name]) if layer.name in self._counts else Diagonal.zero(groups, d)
        if layer.name not in self._dense:
            return Spectrum.zero(groups, d)
        return Spectrum.of_gram(self._dense[layer.name], layer.bias is not None).to(device=torch.device("cpu"))

    def value(self, found: Found) -> dict[str, Spectrum | Diagonal]:
        return for_layers(self._client, found.layers, lambda layer: self.matrix(layer, found))
