"""Measures how far apart the neurons of two networks are, by their outputs on the same inputs.

    D_ab = ‖z_a − z'_b‖,   z_a: the outputs of neuron a before its activation, over all inputs and places

The clients' own data are different samples, so outputs on them cannot be compared one by one. Therefore the server
draws common inputs from the moments of all clients and runs both networks on them. The outputs of a neuron do not
depend on the order of the neurons before it. So these distances need no maps of earlier layers. Only sums are kept.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.errors import InputError, UploadError
from maecho.linalg.finite import is_finite
from maecho.network import kinds
from maecho.network.attention import slow_path
from maecho.network.forward import forward
from maecho.network.hooks import After, watching
from maecho.network.layers import read
from maecho.network.packed.twin import twin_of
from maecho.network.spaces import Space
from maecho.statistics import INPUTS
from maecho.synthesis.pseudo import PseudoInputs, seed_for
from maecho.upload.upload import Upload

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 64
"""How many inputs run at a time. The outputs of all layers for them are held in memory."""


def common_inputs(
    uploads: Sequence[Upload], probes: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[tuple[str, PseudoInputs]]:
    """Draw common inputs from the moments of all clients: pairs of a client's name and the inputs drawn for it.

    A client gets its part of the `probes` by its examples, and every Gaussian at least one. The order of the uploads
    does not matter.
    """
    everyone = sum(upload.examples for upload in uploads)
    found = []
    for upload in sorted(uploads, key=lambda upload: upload.client):
        draws = round(probes * upload.examples / everyone)
        own_seed = seed_for(seed, upload.client)
        found.append((upload.client, PseudoInputs(upload.statistics[INPUTS], draws, CHUNK, own_seed, dtype)))
    return found


class Responses:
    """Compares the neurons of clients with those of a reference client.

    Args:
        model: a network of the clients' architecture, any weights. It is not changed.
        reference: the upload of the reference client.
        uploads: the uploads of all clients. Common inputs are drawn from their moments.
        spaces: the neuron spaces to compare.
        probes: how many inputs to draw.
        seed: the seed of the draws.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: Upload,
        uploads: Sequence[Upload],
        spaces: Sequence[Space],
        probes: int,
        seed: int,
    ):
        tensors = list(reference.weights.values())
        dtype = devices.float32_or_finer(tensors)
        theirs = devices.cast(twin_of(model).network, tensors[0].device, dtype)
        theirs.load_state_dict(reference.tied(reference.weights))
        self._pair = _OwnAndReference(copy.deepcopy(theirs), theirs, spaces)
        self._spaces, self._inputs = spaces, common_inputs(uploads, probes, seed, dtype)

    def distances(self, upload: Upload) -> list[Float[Tensor, "own theirs"]]:
        """For every space, the distances between the upload's neurons and the reference's."""
        self._pair.own.load_state_dict(upload.tied(upload.weights))
        squares: list[Tensor | None] = [None] * len(self._spaces)
        with slow_path(), self._pair.watching():
            for _ in self._runs():
                for k, space in enumerate(self._spaces):
                    for own, theirs in self._pair.outputs(k, space.size):
                        part = _squares(own, theirs)
                        before = squares[k]
                        squares[k] = part if before is None else before + part
        found = []
        for space, total in zip(self._spaces, squares, strict=True):
            if total is None:
                raise InputError(
                    f"space {space.name!r} must hold the outputs of a layer that the network calls as a module, so "
                    "that the activations of its neurons can be compared, got none; use metric='weights'"
                )
            if not is_finite(total):
                raise UploadError(
                    f"{upload.client}: activations in the space {space.name!r} must be finite to be compared, got NaN "
                    "or infinity; use metric='weights'"
                )
            found.append(total.clamp(min=0).sqrt())
        return found

    def _runs(self) -> Iterator[None]:
        """Run both networks on all common inputs, chunk by chunk."""
        for client, inputs in self._inputs:
            for _ in forward(self._pair, inputs, client, progress=False):
                yield
                self._pair.forget()


class _OwnAndReference(nn.Module):
    """Runs two networks of one architecture on the same inputs, and keeps the outputs of the layers whose outputs are
    neurons of the spaces."""

    def __init__(self, own: nn.Module, theirs: nn.Module, spaces: Sequence[Space]):
        super().__init__()
        self.own, self.theirs = own, theirs
        layers = read(own).layers
        self._feeding = [
            [
                name
                for name, layer in layers.items()
                if any((p.tensor, p.axis) == (layer.weight, layer.out_axis) for p in space.places)
            ]
            for space in spaces
        ]
        self._seen: dict[tuple[nn.Module, str], list[Tensor]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the outputs of these layers are kept. `forget` drops them."""
        names = list(dict.fromkeys(name for feeding in self._feeding for name in feeding))
        with contextlib.ExitStack() as stack:
            for network in (self.own, self.theirs):
                stack.enter_context(watching(network, names, after=self._keeper(network)))
            yield

    def _keeper(self, network: nn.Module) -> After:
        def keep(name: str, module: nn.Module, x: Tensor, z: Tensor) -> None:
            # A copy, since the activation after the layer may work in place.
            self._seen.setdefault((network, name), []).append(kinds.output_rows(module, z.detach()).clone())

        return keep

    def forward(self, x: Tensor) -> None:
        self.own(x.clone())  # a network may write into its inputs
        self.theirs(x)

    def forget(self) -> None:
        """Drop the outputs that were kept."""
        self._seen.clear()

    def outputs(self, space: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The outputs of both networks, [neurons, inputs · places], for every call of every layer of this space."""
        for name in self._feeding[space]:
            calls = [self._seen.get((network, name), []) for network in (self.own, self.theirs)]
            rows = [[z.shape[1] for z in seen] for seen in calls]
            if rows[0] != rows[1]:
                raise InputError(
                    f"layer {name!r} must run equally often on equal sizes in all networks, so that its activations "
                    f"can be compared, got outputs of {rows[1]} and {rows[0]} rows; use metric='weights'"
                )
            for own, theirs in zip(*calls, strict=True):
                yield own.mT.reshape(size, -1), theirs.mT.reshape(size, -1)


def _squares(own: Float[Tensor, "a n"], theirs: Float[Tensor, "b n"]) -> Float[Tensor, "a b"]:
    """The squared distance of every row of one from every row of the other."""
    own, theirs = own.double(), theirs.double()
    return own.square().sum(1, keepdim=True) + theirs.square().sum(1) - 2 * own @ theirs.T
