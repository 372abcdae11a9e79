"""The statistic "fisher", the diagonal of the Fisher information: F = Σ_x E_y (∂ log p(y|x) / ∂θ)².

It has one number for each weight. The fast way computes the squares of a layer from the rows of its inputs and of the
gradients at its outputs. That is right if these rows account for the whole gradient of its weight. All other
parameters go the long way, one gradient for each example (see per_example.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from maecho import devices
from maecho.errors import UploadError
from maecho.linalg.finite import is_finite
from maecho.linalg.symmetric import add_into
from maecho.network import kinds
from maecho.network.layers import Layer, complete
from maecho.network.spaces import Move
from maecho.statistics.of_gradients import BackwardGatherer, Batch, Call, Deltas, parameters
from maecho.statistics.parts import check_real
from maecho.statistics.per_example import CHUNK, LongWay, squares, token_squares
from maecho.statistics.statistic import Carrier, Found, Gatherer, Options, Setting, Statistic

KEPT = 2**24
"""The most numbers of inputs that are kept for all directions of a batch."""


class FisherDiagonal(Statistic):
    """A mapping: name of the weight -> a tensor of its shape."""

    name = "fisher"
    reveals = (
        "How much each single weight matters to the model's answers on the data. At the first layer it shows which "
        "pixels or features occur; all of it together, how sure the model is of these data."
    )
    by_name = True
    additive = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Squares(setting)

    def recipe(self, options: Options) -> str:
        return f"sum over examples of squared gradients of log p(y|x), labels {options.labels}"

    def check(self, value: Any, carrier: Carrier) -> Any:
        """Every layer must have one, other parameters may. Each must have its weight's shape and not be negative."""
        self.check_names(value.keys(), carrier)
        return {name: self.check_part(name, found, carrier) for name, found in value.items()}

    def check_names(self, names: Collection[str], carrier: Carrier) -> None:
        client, weights = carrier.client, carrier.weights
        for name in (part for layer in carrier.layers for part in (layer.weight, layer.bias)):
            if name is not None and name not in names:
                raise UploadError(f"{client}: fisher must have a tensor for {name!r}, got none")
        for name in names:
            if name not in weights or not weights[name].is_floating_point():
                raise UploadError(f"{client}: fisher must be of parameters of the network, got one for {name!r}")

    def check_part(self, name: str, part: Any, carrier: Carrier) -> Any:
        what, shape = f"{carrier.client}: fisher of {name!r}", carrier.weights[name].shape
        if not isinstance(part, Tensor) or part.shape != shape:
            got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise UploadError(f"{what} must have its weight's shape {tuple(shape)}, got {got}")
        check_real(what, part)
        if not is_finite(part):
            raise UploadError(f"{what} must be finite, got NaN or infinity")
        if part.numel() and float(part.min()) < 0:
            raise UploadError(f"{what} must not be negative, got {float(part.min()):.3g}")
        return part

    def moved(self, value: Any, carrier: Carrier, move: Move) -> Any:
        out = dict(value)
        for place in move.space.places:
            if place.tensor in out:
                out[place.tensor] = move.carry(out[place.tensor], place)
        return out


class _Squares(BackwardGatherer):
    """Sums up the squares in float64: layer by layer from rows, and the long way for all other parameters."""

    needs_sums = True

    def __init__(self, setting: Setting):
        self._model, self._watch = setting.model, setting.watch
        self._parameters = parameters(setting)
        self._layers = {layer.name: layer for layer in setting.architecture.layers.values()}
        self._long_way = LongWay(setting.model, devices.of(setting.model), setting.outputs)
        self._probed = False
        self._mixed: set[str] = set()
        self._of_rows: dict[str, Tensor] = {}
        self._of_parameters: dict[str, Tensor] = {}
        self._fast: dict[str, list[Call]] = {}
        self._used: set[str] = set()
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._room = 0

    def begin(self, batch: Batch) -> None:
        if not self._probed:
            self._probe(batch)
        grouped: defaultdict[str, list[Call]] = defaultdict(list)
        for call in batch.calls:
            grouped[call.layer.name].append(call)
        self._fast = {
            name: own
            for name, own in grouped.items()
            if name not in self._mixed
            and all(kinds.examples_first(call.module, call.x, call.z, batch.step.size) for call in own)
        }
        self._used = set()
        self._kept, self._room = {}, KEPT

    def _probe(self, batch: Batch) -> None:
        """Find the layers where the first example changes more than the first entry of the outputs. There another axis
        comes first, or examples mix, so rows do not belong to examples."""
        v = batch.directions[batch.order[0]]
        only_first = torch.zeros_like(v)
        only_first[0] = v[0]
        found = batch.backward(only_first, [call.z for call in batch.calls])
        for call, delta in zip(batch.calls, found, strict=True):
            if delta is not None and bool(delta[1:].any()):
                self._mixed.add(call.layer.name)
        self._probed = batch.step.size > 1

    def see_gradients(self, batch: Batch, deltas: Deltas, sums: Mapping[str, Tensor | None] | None) -> None:
        self._used |= {name for name, total in (sums or {}).items() if total is not None}
        for name, own in list(self._fast.items()):
            F, total = self._squares(own, deltas, batch.step.size, summed=sums is not None)
            if sums is not None and not self._agrees(self._layers[name], total, F, sums, batch):
                del self._fast[name]
            else:
                add_into(self._of_rows, name, F)

    def _squares(self, own: list[Call], deltas: Deltas, n: int, summed: bool) -> tuple[Tensor, Tensor]:
        """From the rows of all uses of one layer: the sum over examples of squared gradients, and, if `summed`, of
        gradients."""
        layer = own[0].layer
        groups, out, d = layer.shape(self._parameters)
        F = torch.zeros(groups, out, d, dtype=torch.float64)
        total = torch.zeros_like(F)
        used = [(call, delta) for call in own if (delta := deltas[id(call)]) is not None]
        if not used:
            return F, total
        places = sum(delta[0].numel() // (groups * out) for _, delta in used)
        entries = groups * d * (places if places == 1 else max(places, out))
        size = n if layer.one_hot else max(1, CHUNK // entries)
        for start in range(0, n, size):
            piece = slice(start, start + size)
            g = _gradients(used, piece, groups, out)
            x, squared = self._inputs(layer, used, piece, groups)
            if layer.one_hot:
                found = token_squares(x[0].to(g.device), g[0], d, kinds.frozen_token(own[0].module))
            else:
                found = squares(x, g, squared, summed)
            F += found[0].cpu()
            if summed:
                total += found[1].cpu()
        return F, total

    def _inputs(
        self, layer: Layer, used: list[tuple[Call, Tensor]], piece: slice, groups: int
    ) -> tuple[Tensor, Tensor | None]:
        """The inputs of a layer for some examples, and their squares if each example has one row. All directions of a
        batch share them, so they are kept while there is room."""
        key = (piece.start, *(id(call) for call, _ in used))
        if key in self._kept:
            return self._kept[key]
        x = _inputs(layer, used, piece, groups)
        found = x, x.square() if x.shape[2] == 1 and not layer.one_hot else None
        if x.numel() <= self._room:
            self._room -= x.numel()
            self._kept[key] = found
        return found

    def _agrees(self, layer: Layer, total: Tensor, F: Tensor, sums: Mapping[str, Tensor | None], batch: Batch) -> bool:
        """Whether the layer's rows account for the whole gradient. They do not if the weight is used elsewhere too."""
        of_autograd = {}
        for name in (layer.weight, layer.bias):
            if name is not None:
                found = sums[name]
                of_autograd[name] = torch.zeros_like(self._parameters[name]) if found is None else found
        gap = float((layer.matrix(of_autograd).cpu().double() - total).norm())
        # By the inequality of Cauchy and Schwarz, the norm of a sum over n examples is at most this.
        scale = math.sqrt(float(F.sum()) * batch.step.size)
        return gap <= math.sqrt(torch.finfo(batch.step.output.dtype).eps) * scale

    def end(self, batch: Batch) -> None:
        """Add the squares of all parameters that the fast way does not cover."""
        self._kept = {}
        done = {part for name in self._fast for part in (self._layers[name].weight, self._layers[name].bias)}
        first = {id(p): name for name, p in self._model.named_parameters()}
        names = {first[id(p)]: name for name, p in self._parameters.items() if name in self._used - done}
        if not names:
            return
        directions = [v.to(batch.step.output) for v in batch.directions]
        with self._watch.pause():
            found = self._long_way.squares(batch.step.inputs, directions, list(names))
        for name, F in found.items():
            add_into(self._of_parameters, names[name], F)

    def value(self, found: Found) -> dict[str, Tensor]:
        """The squares of every parameter of floating point."""
        self.check_gathered()
        F = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self._parameters.items()}
        for name, of_layer in self._of_rows.items():
            for part, value in self._layers[name].write(of_layer, F).items():
                F[part] = F[part] + value
        for name, of_parameter in self._of_parameters.items():
            F[name] = F[name] + of_parameter
        return F


def _inputs(layer: Layer, used: list[tuple[Call, Tensor]], piece: slice, groups: int) -> Tensor:
    """The inputs of a layer, for some examples: [groups, examples, places, in]."""
    found = []
    for call, _ in used:
        x, count = kinds.rows(call.module, call.x[piece]), len(call.x[piece])
        x = x if layer.one_hot else complete(x, layer)
        found.append(x.reshape(groups, count, x.shape[1] // count, *x.shape[2:]))
    return torch.cat(found, 2)


def _gradients(used: list[tuple[Call, Tensor]], piece: slice, groups: int, out: int) -> Tensor:
    """The gradients at its outputs, for the same examples: [groups, examples, places, out]."""
    return torch.cat(
        [
            devices.double(kinds.output_rows(call.module, delta[piece])).reshape(groups, len(call.x[piece]), -1, out)
            for call, delta in used
        ],
        2,
    )
