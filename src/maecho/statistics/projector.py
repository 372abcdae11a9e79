"""The statistic "projector" of the MA-Echo release: a recursion on mean inputs of batches, for every layer."""

from __future__ import annotations

from torch import Tensor, nn

from maecho.linalg import recursion
from maecho.linalg.recursion import MeanRecursion
from maecho.linalg.spectra import Spectrum, projector
from maecho.linalg.symmetric import Diagonal
from maecho.network import kinds
from maecho.network.layers import Layer, complete
from maecho.statistics.gram import GramSums
from maecho.statistics.of_layers import OfLayers, for_layers
from maecho.statistics.parts import PROJECTORS
from maecho.statistics.statistic import Found, Gatherer, Options, Setting

MEAN_OF = 64
"""How many examples a mean is over: the batch size of the release. Larger batches are cut into pieces of this size."""


class Projector(OfLayers):
    """The directions in which the mean inputs of batches lie, with eigenvalues in [0, 1]."""

    name = "projector"
    kind = PROJECTORS
    reveals = (
        "Directions in which batch means of a layer's inputs lie. At the first layer the leading ones look like "
        "average inputs."
    )
    by_default = True
    largest = 1.0

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Recursions(setting.client)

    def recipe(self, options: Options) -> str:
        return (
            f"recursion on means of at most {MEAN_OF} examples, step {recursion.STEP}, damping "
            f"{recursion.DAMPING:.4g} ({recursion.DAMPING_CONVOLUTION:.4g} for convolutions)"
        )


class _Recursions(Gatherer):
    """Runs one recursion for each layer.

    The mean of one-hot rows holds token frequencies. For such layers the exact projector is diagonal, so it serves
    the same purpose without a matrix.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._found: dict[str, MeanRecursion] = {}
        self._tokens = GramSums(client)

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        if layer.one_hot:
            self._tokens.see(layer, module, x)
            return
        x = x.detach()
        x = x.unsqueeze(0) if kinds.unbatched(module, x) else x
        for piece in x.split(MEAN_OF):
            means = complete(kinds.mean_rows(module, piece), layer)
            if layer.name not in self._found:
                damping = recursion.DAMPING_CONVOLUTION if layer.convolution else recursion.DAMPING
                self._found[layer.name] = MeanRecursion(means.shape[0], means.shape[2], damping)
            self._found[layer.name].add(means.cpu())  # a long chain of small products is slow on a GPU

    def value(self, found: Found) -> dict[str, Spectrum | Diagonal]:
        return for_layers(self._client, found.layers, lambda layer: self._matrix(layer, found))

    def _matrix(self, layer: Layer, found: Found) -> Spectrum | Diagonal:
        if layer.one_hot:
            return projector(self._tokens.matrix(layer, found), recursion.DAMPING)
        if layer.name in self._found:
            return self._found[layer.name].spectrum()
        groups, _, d = layer.shape(found.weights)
        return Spectrum.zero(groups, d)
