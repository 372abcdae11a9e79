"""How far apart the neurons of two networks are by what they give out on the same inputs.

    D_ab = ‖z_a − z'_b‖,   z_a: what neuron a gives out before its activation, over all inputs and places

Each client's own data give its neurons other samples, which cannot be compared one by one; so the server draws common
inputs from what all clients told of theirs and runs both networks on them. A neuron's responses do not depend on the
order of the neurons before it: no map has to be carried on for these distances. Sums alone are kept.
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
from maecho.network import kinds
from maecho.network.attention import copied, slow_path
from maecho.network.forward import forward
from maecho.network.hooks import After, watching
from maecho.network.layers import read
from maecho.network.spaces import Space
from maecho.synthesis.pseudo import PseudoInputs, seed_for
from maecho.upload.upload import Upload

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 64
"""Inputs that run at a time: what all layers give out for them is held."""


def common_inputs(
    uploads: Sequence[Upload], probes: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[tuple[str, PseudoInputs]]:
    """Inputs by whose moments they are drawn from: `probes` shared out by examples, at least one for every Gaussian.

    The same ones whatever the order of the uploads.
    """
    everyone = sum(upload.examples for upload in uploads)
    found = []
    for upload in sorted(uploads, key=lambda upload: upload.client):
        draws = round(probes * upload.examples / everyone)
        own_seed = seed_for(seed, upload.client)
        found.append((upload.client, PseudoInputs(upload.statistics["moments"], draws, CHUNK, own_seed, dtype)))
    return found


class Responses:
    """The reference's network, with which others are compared.

    Args:
        model: of the architecture, its own weights being of no matter. Left as it is.
        reference: whose neurons the others' are compared with.
        uploads: of all clients, from whose moments the inputs are drawn.
        spaces: whose neurons are compared.
        probes: how many inputs.
        seed: of the draws.
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
        theirs = copied(model).to(tensors[0].device, dtype)
        theirs.load_state_dict(reference.state_dict())
        self._pair = _Pair(copy.deepcopy(theirs), theirs, spaces)
        self._spaces, self._inputs = spaces, common_inputs(uploads, probes, seed, dtype)

    def distances(self, upload: Upload) -> list[Float[Tensor, "own theirs"]]:
        """Of the upload's neurons from the reference's, for every space."""
        self._pair.own.load_state_dict(upload.state_dict())
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
                    f"space {space.name!r} must hold the outputs of a layer that the network calls as a module for its "
                    "neurons' activations to be compared, got none; use metric='weights'"
                )
            if not total.isfinite().all():
                raise UploadError(
                    f"{upload.client}: activations in the space {space.name!r} must be finite to be compared, got NaN "
                    "or infinity; use metric='weights'"
                )
            found.append(total.clamp(min=0).sqrt())
        return found

    def _runs(self) -> Iterator[None]:
        """Both networks on all common inputs, a chunk at a time."""
        for client, inputs in self._inputs:
            for _ in forward(self._pair, inputs, client, progress=False):
                yield
                self._pair.forget()


class _Pair(nn.Module):
    """Two networks of one architecture on the same inputs, and what the layers that feed the spaces gave out."""

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
        """Inside, what the layers give out is kept until `forget`."""
        names = list(dict.fromkeys(name for feeding in self._feeding for name in feeding))
        with contextlib.ExitStack() as stack:
            for network in (self.own, self.theirs):
                stack.enter_context(watching(network, names, after=self._keeper(network)))
            yield

    def _keeper(self, network: nn.Module) -> After:
        def keep(name: str, module: nn.Module, x: Tensor, z: Tensor) -> None:
            # A copy: an activation after it may work in place.
            self._seen.setdefault((network, name), []).append(kinds.output_rows(module, z.detach()).clone())

        return keep

    def forward(self, x: Tensor) -> None:
        self.own(x)
        self.theirs(x)

    def forget(self) -> None:
        self._seen.clear()

    def outputs(self, space: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """[neurons, inputs · places] of both, for every call of every layer that feeds the space."""
        for name in self._feeding[space]:
            calls = [self._seen.get((network, name), []) for network in (self.own, self.theirs)]
            rows = [[z.shape[1] for z in seen] for seen in calls]
            if rows[0] != rows[1]:
                raise InputError(
                    f"layer {name!r} must run alike in all networks for its activations to be compared, got outputs of "
                    f"{rows[1]} and {rows[0]} rows; use metric='weights'"
                )
            for own, theirs in zip(*calls, strict=True):
                yield own.mT.reshape(size, -1), theirs.mT.reshape(size, -1)


def _squares(own: Float[Tensor, "a n"], theirs: Float[Tensor, "b n"]) -> Float[Tensor, "a b"]:
    own, theirs = own.double(), theirs.double()
    return own.square().sum(1, keepdim=True) + theirs.square().sum(1) - 2 * own @ theirs.T
