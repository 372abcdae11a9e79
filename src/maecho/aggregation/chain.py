"""echo-chain: the merged network fitted layer after layer to the outputs of the clients' layers, on drawn inputs.

    W_l = argmin_W  Σ_i Σ ‖W h − z_i‖² + ε ‖W − W̄_l‖²,   l = 1 … L

h is the merged network's own input to layer l, so every layer repairs what the layers before it lost; z_i is the output
of client i's layer for the same sample. The inputs are drawn from the moments in the uploads. One shot, no data, no
training: this is echo-relay with clients that the server simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from maecho import devices
from maecho.aggregation.method import Guide
from maecho.alignment.skeleton import skeleton
from maecho.echo.fit import Head, Regression
from maecho.echo.server import RelayServer
from maecho.echo.simulated import Drawing
from maecho.network.forward import call
from maecho.network.packed.twin import copied
from maecho.statistics import INPUTS
from maecho.synthesis.pseudo import Noise, PseudoInputs
from maecho.upload.cohort import Cohort
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class EchoChain:
    """Layer by layer regression on drawn inputs.

    Args:
        ridge: how strongly the fit is pulled to the average; see Regression.
        head: how the last layer is fitted: by "regression" like the rest, by "ridge" to the labels, or by "lda".
        pull: how far fully connected layers are fitted to the class means of z instead of z, in [0, 1]; see Regression.
        draws: how many inputs are drawn for all clients together. A client's part follows from its examples.
        chunk: how many inputs are in memory at a time.
        seed: the seed of the draws.
        features: whether to correct the features of drawn inputs, for uploads that have features; see Correction.
        noise: what inputs are made of. "leaves" gives images edges, "gaussian" does not; see synthesis/leaves.py.
        model: the network that the uploads are weights of. Its own weights do not matter, and it is not changed.
    """

    guide: ClassVar[Guide] = Guide(
        does=(
            "fits layer after layer to the clients' layers, on drawn inputs that have passed through the merged "
            "layers before"
        ),
        uploads="moments of the raw inputs, better with features; the server needs the network itself (`model=`)",
        different="yes",
        convolutions="yes",
        residual="yes",
        cost=(
            "seconds (for CNNs on a CPU minutes); memory of one upload, a chunk of inputs and, with features, up "
            "to 1 GiB"
        ),
        when="to get the best model in one shot; `maecho.relay` goes on from it with more rounds",
    )

    ridge: float = Regression.ridge
    head: Head = Regression.head
    pull: float = Regression.pull
    draws: int = Drawing.draws
    chunk: int = Drawing.chunk
    seed: int = Drawing.seed
    features: bool = Drawing.features
    noise: Noise = Drawing.noise
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.parts()

    def parts(self) -> tuple[Regression, Drawing]:
        """The options in the form that RelayServer takes."""
        drawing = Drawing(self.draws, self.chunk, self.seed, self.features, self.noise)
        return Regression(self.ridge, self.head, self.pull), drawing

    @property
    def needs(self) -> frozenset[str]:
        return self.parts()[1].needs

    @property
    def uses(self) -> frozenset[str]:
        return self.parts()[1].uses

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        cohort = uploads if isinstance(uploads, Cohort) else Cohort(uploads, self.needs, "echo-chain", uses=self.uses)
        first = cohort[0]
        network = copied(skeleton(self.model, first, "echo-chain", "runs it"))
        device = next(iter(first.weights.values())).device
        dtype = devices.float32_or_finer(first.weights.values())
        regression, drawing = self.parts()
        finer = devices.cast(copied(network), device, dtype)
        network = finer if _runs(finer, first, device, dtype) else network.to(device)
        server = RelayServer(network, rounds=1, uploads=cohort, regression=regression, drawing=drawing)
        merged = server.result()
        for name, tensor in first.state_dict().items():
            merged[name] = merged[name].to(tensor.dtype)
        return merged


def _runs(network: nn.Module, first: Upload, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the network runs in this dtype. One that casts inside may only run in its own."""
    x = next(iter(PseudoInputs(first.statistics[INPUTS], 1, 1, 0, dtype)))[0]
    try:
        with torch.no_grad():
            call(network.eval(), x, device)
    except RuntimeError:
        return False
    return True
