"""The statistic "gram", the Gram matrix of every layer: G = Σ x xᵀ over the layer's inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maecho.formatting import names_of
from maecho.linalg.leading import leading_of_gram
from maecho.linalg.spectra import Spectrum
from maecho.linalg.sums.products import NARROW, SquareSums, scaled, single
from maecho.linalg.sums.shifts import patch_gram
from maecho.linalg.symmetric import Diagonal, add_into
from maecho.network import kinds
from maecho.network.layers import Layer, completed
from maecho.statistics.of_layers import OfLayers, for_layers, widths
from maecho.statistics.statistic import Carrier, Found, Gatherer, Options, Setting

WAITING = 2**23
"""How many numbers of the maps of a layer wait at most, beside those of one batch."""


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
        self._dense: dict[str, SquareSums] = {}
        self._counts: dict[str, Tensor] = {}
        self._maps: dict[str, list[Tensor]] = {}
        self._kernels: dict[str, tuple[int, int]] = {}

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        x = x.detach()
        x = x.unsqueeze(0) if kinds.unbatched(module, x) else x
        for piece in x.split(kinds.examples_at_once(module, x)):
            if layer.one_hot:
                counts = kinds.rows(module, piece)[0].bincount(minlength=kinds.inputs(module)).double()
                add_into(self._counts, layer.name, counts.unsqueeze(0).cpu())
            else:
                self._add(layer, module, piece.cpu() if piece.device.type == "mps" else piece)  # mps has no float64

    def _add(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        sums = self._dense.get(layer.name)
        if sums is not None and sums.width > NARROW and not sums.few:
            found = kinds.maps(module, x)
            if found is not None:
                self._wait(layer, *found)
                return
        rows = completed(kinds.rows(module, x), layer)
        if sums is None:
            sums = self._dense[layer.name] = SquareSums(len(rows), rows.shape[-1], rows.device)
        sums.add(rows)

    def _wait(self, layer: Layer, maps: Tensor, kernel: tuple[int, int]) -> None:
        """Keep maps until there are many. Then the products at their edges are no longer small ones."""
        waiting = self._maps.setdefault(layer.name, [])
        if waiting and waiting[0].shape[2:] != maps.shape[2:]:
            self._add_maps(layer)
        waiting.append(maps)
        self._kernels[layer.name] = kernel
        if sum(part.numel() for part in waiting) >= WAITING:
            self._add_maps(layer)

    def _add_maps(self, layer: Layer) -> None:
        """Add the patches of the maps that wait, without making rows of them: a third of the work or less."""
        waiting = self._maps.get(layer.name)
        if not waiting:
            return
        maps, kernel, sums = torch.cat(waiting, 1), self._kernels[layer.name], self._dense[layer.name]
        waiting.clear()
        maps, factor = scaled(maps.float()) if single(maps, sums.width) else (maps.double(), 1.0)
        gram, total = patch_gram(maps, kernel)
        places = maps.shape[1] * (maps.shape[2] - kernel[0] + 1) * (maps.shape[3] - kernel[1] + 1)
        gram *= factor
        if layer.bias is not None:
            ones = (factor**0.5 * total).unsqueeze(-1)
            count = ones.new_full((len(ones), 1, 1), places)
            gram = torch.cat([torch.cat([gram, ones], -1), torch.cat([ones.mT, count], -1)], -2)
        sums.add_sums(gram, places)

    def matrix(self, layer: Layer, found: Found) -> Spectrum | Diagonal:
        """The Gram matrix of one layer. It has rank 0 if nothing reached the layer."""
        self._add_maps(layer)
        groups, _, d = layer.shape(found.weights)
        if layer.one_hot:
            return Diagonal(self._counts[layer.name]) if layer.name in self._counts else Diagonal.zero(groups, d)
        if layer.name not in self._dense:
            return Spectrum.zero(groups, d)
        G, enough = self._dense[layer.name].dense(), found.enough(widths(found))
        return leading_of_gram(G, layer.bias is not None, enough).to(device=torch.device("cpu"))

    def value(self, found: Found) -> dict[str, Spectrum | Diagonal]:
        return for_layers(self._client, found.layers, lambda layer: self.matrix(layer, found))
