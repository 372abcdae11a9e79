"""Brings the neurons of several uploads into one order, that of a reference client: uploads -> uploads.

It goes through the layers in order of execution. In each it matches a client's neurons to those of the reference by
optimal transport between their incoming weights (Singh and Jaggi, NeurIPS 2020):

    min_T  Σ_ab T_ab ‖w_a − w'_b‖    s.t. T 1 = 1/n, Tᵀ 1 = 1/n, T ≥ 0

The weights of a layer and its biases are each divided by their root mean square first, since they have other units.
Before that, the maps of earlier layers are applied to the layer's inputs. Exact transport of uniform masses is a
permutation; entropic transport is a soft one. Weights, biases and statistics all move together: x becomes M x, so the
W that reads x becomes W Mᵀ, and P becomes M P Mᵀ. The last layer keeps its order, since its rows are classes. Neurons
may also be compared by their outputs on common inputs (`responses.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.alignment.responses import Responses, common_inputs
from maecho.alignment.skeleton import skeleton
from maecho.errors import InputError, UploadError
from maecho.network.layers import Layer
from maecho.network.packed.twin import twin_of
from maecho.network.spaces import Move, Space, Spaces, check
from maecho.network.tracing import proven
from maecho.options import POSITIVE, number, one_of
from maecho.statistics import INPUTS, STATISTICS
from maecho.upload.cohort import Cohort
from maecho.upload.upload import Upload

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Alignment:
    """Matches the neurons of clients to those of a reference client.

    Args:
        transport: "emd" (exact, a permutation) or "sinkhorn" (entropic).
        regularisation: the strength of the entropic transport, relative to the mean cost.
        reference: the client whose order all others take: "largest" (most examples), or a client's name.
        metric: neurons are compared by their incoming "weights", or by their "activations": their outputs before the
            nonlinearity, on common inputs drawn from all uploads' moments. Activations need `model` and the moments.
            Neither metric removes the scales of single neurons. Suppose a neuron a of a ReLU network has its incoming
            weights times c and its outgoing weights times 1/c. Then the network computes the same, but by activations a
            is |c − 1| ‖z_a‖ away from the neuron that it equals. The activations of later layers do not change, but
            their incoming weights do.
        probes: how many common inputs to draw. A client's part follows from its examples, and every Gaussian of every
            client gets at least one.
        seed: the seed of the draws.
        spaces: the neuron spaces (which axes are the same neurons), if the clients could not trace their network.
        model: a network of this architecture, any weights. The spaces are found by running it on inputs drawn from the
            uploads' moments if the uploads do not carry them, and it is run for activations. It is not changed.
    """

    _name: ClassVar[str] = "ot"

    transport: Literal["emd", "sinkhorn"] = "emd"
    regularisation: float = 0.05
    reference: str = "largest"
    metric: Literal["weights", "activations"] = "weights"
    probes: int = 1000
    seed: int = 0
    spaces: Spaces | None = field(default=None, repr=False)
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        one_of("transport", self.transport, ("emd", "sinkhorn"))
        number("regularisation", self.regularisation, POSITIVE, 0)
        one_of("metric", self.metric, ("weights", "activations"))
        number("probes", self.probes, "a whole number, at least 1", 1, whole=True)
        number("seed", self.seed, "a whole number, at least 0", 0, whole=True)

    @property
    def _for_metric(self) -> frozenset[str]:
        """The statistics that the comparison of neurons needs."""
        return frozenset({INPUTS} if self.metric == "activations" else ())

    def align(self, uploads: Sequence[Upload]) -> list[Upload]:
        """The same uploads, with their neurons in the order of the reference."""
        given = list(uploads)
        spaces = self._spaces(given)
        if self.reference == "largest":
            reference = max(given, key=lambda upload: (upload.examples, upload.client))
        else:
            found = next((upload for upload in given if upload.client == self.reference), None)
            if found is None:
                raise InputError(f"reference must be largest or the name of a client, got {self.reference!r}")
            reference = found
        responses = None
        if self.metric == "activations":
            Cohort(given, self._for_metric, self._name)  # raises an error if an upload lacks it
            network = skeleton(self.model, reference, self._name, "with metric='activations' runs it")
            responses = Responses(network, reference, given, spaces, self.probes, self.seed)
        return [u if u is reference else self._to(reference, u, spaces, responses) for u in given]

    def _spaces(self, uploads: Sequence[Upload]) -> Spaces:
        """The spaces given; if there are none, those of the largest client that could trace its network; if there are
        none either, those of the model."""
        largest = sorted(uploads, key=lambda upload: (-upload.examples, upload.client))
        upload = largest[0]
        spaces = self.spaces or next((one.spaces for one in largest if one.spaces is not None), None)
        if spaces is None and self.model is not None:
            spaces = self._of_model(self.model, uploads)
        if spaces is None:
            raise UploadError(
                f"{upload.client}: matching needs the neuron spaces of the architecture, got none; give a network of "
                "this architecture as model= beside uploads with moments, or the spaces as spaces="
            )
        check(spaces, upload.weights)
        return spaces

    def _of_model(self, model: nn.Module, uploads: Sequence[Upload]) -> Spaces | None:
        """The spaces of the model that hold on a few drawn inputs. None if no inputs can be drawn."""
        drawn_from = [upload for upload in uploads if INPUTS in upload.statistics]
        dtype = devices.float32_or_finer(list(model.parameters()))
        for _, inputs in common_inputs(drawn_from, len(drawn_from), self.seed, dtype):
            return proven(twin_of(model, always_copy=False).network, next(iter(inputs))[0])[0]
        return None

    def _to(self, reference: Upload, upload: Upload, spaces: Spaces, responses: Responses | None) -> Upload:
        settled: set[tuple[str, int]] = set()
        inner = {(place.tensor, place.axis) for space in spaces for place in space.places}
        distances = None if responses is None else responses.distances(upload)
        aligned = upload
        for k, space in enumerate(spaces):
            if distances is None:
                rows = rows_of(upload.layers, [reference.weights, aligned.weights], space, inner - settled)
                cost = torch.cdist(rows[1], rows[0])
            else:
                cost = distances[k]
            aligned = moved(aligned, Move(space, self._match(cost)))
            settled |= {(place.tensor, place.axis) for place in space.places}
        return replace(aligned, recipe={**upload.recipe, "aligned_to": reference.client})

    def _match(self, cost: Float[Tensor, "own theirs"]) -> Float[Tensor, "theirs own"]:
        """The map M. Row a holds the weights with which own neurons are mixed into the neuron a of the reference."""
        try:
            import ot
        except ImportError as error:
            raise InputError(
                "matching by optimal transport needs POT, got none: pip install 'maecho[peers]'"
            ) from error
        n = len(cost)
        mass, costs = torch.full((n,), 1 / n, dtype=torch.float64).numpy(), cost.cpu().numpy()
        if self.transport == "emd":
            plan = torch.from_numpy(ot.emd(mass, mass, costs))
            order = plan.argmax(0)
            # Exact transport of uniform masses is a permutation. This removes round-off from it.
            M = torch.eye(n, dtype=torch.float64)[order] if len(order.unique()) == n else n * plan.T
            return M.to(cost.device)
        strength = self.regularisation * max(float(cost.mean()), 1e-12)
        plan = ot.bregman.sinkhorn_log(mass, mass, costs, strength, numItermax=5000, stopThr=1e-9, warn=False)
        return n * torch.from_numpy(plan).T.to(cost.device)


def rows_of(
    network: Sequence[Layer], clients: Sequence[Mapping[str, Tensor]], space: Space, open_axes: set[tuple[str, int]]
) -> list[Float[Tensor, "neurons features"]]:
    """The incoming weights of each client's neurons of a space, from all layers whose own inputs are in order already.

    The weights of a layer, and its biases, are divided by their root mean square over all clients, in float64. So
    neither the units of a layer's inputs nor those of its outputs have a part in the comparison.
    """
    layers = {layer.weight: layer for layer in network}
    found: list[list[Tensor]] = []
    waiting: list[list[Tensor]] = []
    for place in space.places:
        layer = layers.get(place.tensor)
        if layer is None or place.axis != layer.out_axis:
            continue
        rows = [layer.matrix(weights).flatten(0, 1).double() for weights in clients]
        width = rows[0].shape[1] - (layer.bias is not None)
        for part in (slice(0, width), slice(width, None)):
            block = _of_mean_square_one([one[:, part] for one in rows])
            (waiting if (place.tensor, 1 - place.axis) in open_axes else found).append(block)
    if not (found or waiting):
        raise InputError(
            f"space {space.name!r} must hold the outputs of a layer, so that its neurons can be compared, got none"
        )
    return [torch.cat(blocks, 1) for blocks in zip(*(found or waiting), strict=True)]


def _of_mean_square_one(blocks: list[Tensor]) -> list[Tensor]:
    """The blocks of all clients, divided by one number. Blocks of zeros stay zeros."""
    largest = max((float(block.abs().max()) for block in blocks if block.numel()), default=0.0)
    if not largest > 0:
        return blocks
    blocks = [block / largest for block in blocks]  # squares of very small numbers would be 0
    scale = torch.stack([block.square().mean() for block in blocks]).mean().sqrt()
    return [block / scale for block in blocks]


def moved(upload: Upload, move: Move) -> Upload:
    """The upload after a move: the neurons of one space are mapped wherever they occur."""
    weights = dict(upload.weights)
    for place in move.space.places:
        weights[place.tensor] = move.carry(weights[place.tensor], place)
    statistics = {name: STATISTICS[name].moved(value, upload, move) for name, value in upload.statistics.items()}
    return replace(upload, weights=weights, statistics=statistics)
