"""What a client can say of its features: moments of what passes the narrow layer of its network.

All that the network makes of an example passes through the inputs of that layer (see network/narrow.py). To the layers
from there on, moments of these inputs are what moments of the raw inputs are to the whole network.
"""

from __future__ import annotations

from torch import Tensor, nn

from maecho.network.forward import Pass
from maecho.network.layers import Architecture
from maecho.network.narrow import narrow
from maecho.statistics.gaussians import Covariance, Moments
from maecho.statistics.scatter import ClassScatter


class Features:
    """Moments of a client's features, a batch at a time."""

    def __init__(self, model: nn.Module, architecture: Architecture, covariance: Covariance = "class"):
        self._model, self._architecture = model, architecture
        self._scatter = ClassScatter(1, covariance)
        self._seen: dict[str, Tensor] = {}
        self._layer: str | None = None
        self.busy = False
        """Whether the model is being tried out, so that what runs through it is no data."""
        self.reason = ""
        """Why there are none."""

    def see(self, layer: str, x: Tensor) -> None:
        if self._layer in (None, layer) and not self.reason:
            self._seen[layer] = x.detach()

    def add(self, step: Pass) -> None:
        """A batch, all of whose layers have been seen."""
        if self._layer is None and not self.reason:
            self._find(step)
        if self._layer is not None:
            x = self._seen[self._layer]
            if x.shape[0] != step.size:
                self._layer, self.reason = None, "the network is narrow for some batches and not for others"
            else:
                self._scatter.add(x, step.labels)
        self._seen.clear()

    def _find(self, step: Pass) -> None:
        self.busy = True
        try:
            self._layer = narrow(self._model, self._architecture, step.inputs, self._seen)
        finally:
            self.busy = False
        if self._layer is None:
            self.reason = "the network has no fully connected layer behind others that all examples pass through"

    def moments(self) -> dict[str, Moments]:
        return {} if self._layer is None or self.reason else {self._layer: self._scatter.moments()}
