"""The statistic "projector" of the MA-Echo release: a recursion on means over groups of examples, for every layer."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.linalg import recursion
from maecho.linalg.recursion import MeanRecursion
from maecho.linalg.spectra import Spectrum, projector
from maecho.linalg.symmetric import Diagonal
from maecho.network import kinds
from maecho.network.forward import Pass
from maecho.network.layers import Layer, complete
from maecho.statistics.gram import GramSums
from maecho.statistics.of_layers import OfLayers, for_layers
from maecho.statistics.parts import PROJECTORS
from maecho.statistics.statistic import Found, Gatherer, Options, Setting

RELEASED_MEAN_OF = 64
"""How many examples a mean is over in the release: its batch size."""


class Projector(OfLayers):
    """The directions in which the mean inputs of groups of examples lie, with eigenvalues in [0, 1]."""

    name = "projector"
    kind = PROJECTORS
    reveals = (
        "Directions in which means of groups of a layer's inputs lie. At the first layer the leading ones look like "
        "average inputs."
    )
    by_default = True
    largest = 1.0

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Recursions(setting.client, setting.options.mean_of)

    def recipe(self, options: Options) -> str:
        return (
            f"recursion on means of {options.mean_of} examples, step {recursion.STEP}, damping "
            f"{recursion.DAMPING:.4g} ({recursion.DAMPING_CONVOLUTION:.4g} for convolutions)"
        )


class Means:
    """Means of groups of entries that come in pieces of any size.

    A group takes the next `of` entries, whatever pieces they come in. Entries may differ in shape, as sequences of
    several lengths do. Then each place is averaged over the entries of the group that have it.
    """

    def __init__(self, of: int) -> None:
        self._of = of
        self._sum: Tensor | None = None
        self._counts: Tensor | None = None
        self._entries = 0

    def add(self, x: Tensor) -> list[Tensor]:
        """Add entries [n, ...]. Returns the means of all groups that are full now, each [groups, ...]."""
        missing = self._of - self._entries if self._entries else 0
        found = []
        if missing:
            self._add(x[:missing])
            if self._entries == self._of:
                found += self.rest()
            x = x[missing:]
        whole = len(x) // self._of
        if whole:
            groups = x[: whole * self._of].unflatten(0, (whole, self._of))
            found.append(groups.sum(1, dtype=torch.float64) / self._of)
        if len(x) > whole * self._of:
            self._add(x[whole * self._of :])
        return found

    def rest(self) -> list[Tensor]:
        """The mean of the entries that are no full group yet, [1, ...]; nothing if there are none."""
        total, counts, self._sum, self._counts, self._entries = self._sum, self._counts, None, None, 0
        return [] if total is None or counts is None else [(total / counts.clamp(min=1)).unsqueeze(0)]

    def _add(self, x: Tensor) -> None:
        total = x.sum(0, dtype=torch.float64)
        counts = torch.full_like(total, len(x))
        if self._sum is not None and self._counts is not None:
            shape = [max(sizes) for sizes in zip(total.shape, self._sum.shape, strict=True)]
            total, before = _extended(total, shape), _extended(self._sum, shape)
            counts, counted = _extended(counts, shape), _extended(self._counts, shape)
            total, counts = before + total, counted + counts
        self._sum, self._counts = total, counts
        self._entries += len(x)


def _extended(x: Tensor, shape: list[int]) -> Tensor:
    """The tensor with zeros behind it on every axis, up to this shape."""
    missing = [size - own for size, own in zip(shape, x.shape, strict=True)]
    return functional.pad(x, [size for axis in reversed(missing) for size in (0, axis)]) if any(missing) else x


class _Recursions(Gatherer):
    """Runs one recursion for each layer.

    Of a layer that is called several times a batch, every call has groups of its own. Their means are added group by
    group, and within a group call by call. So the order is the same whatever the size of the batches; until a batch
    ends, the means of the groups that it fills wait.

    The mean of one-hot rows holds token frequencies. For such layers the exact projector is diagonal, so it serves
    the same purpose without a matrix.
    """

    def __init__(self, client: str, mean_of: int) -> None:
        self._client, self._mean_of = client, mean_of
        self._recursions: dict[str, MeanRecursion] = {}
        self._tokens = GramSums(client)
        self._examples = 0
        self._calls: dict[str, list[_Call]] = {}
        self._called: Counter[str] = Counter()

    def expect(self, examples: int) -> None:
        self._examples = examples

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        if layer.one_hot:
            self._tokens.see(layer, module, x)
            return
        x = x.detach()
        x = x.cpu() if x.device.type == "mps" else x  # mps has no float64
        calls = self._calls.setdefault(layer.name, [])
        if self._called[layer.name] == len(calls):
            calls.append(_Call(layer, Means(self._mean_of)))
        call = calls[self._called[layer.name]]
        self._called[layer.name] += 1
        call.module = module
        call.ready += call.means.add(self._entries(module, x))

    def _entries(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input with the axis of examples first. If no axis has one entry for each, the first axis is taken."""
        if kinds.unbatched(module, x):
            return x.unsqueeze(0)
        second = x.dim() > 2 and not kinds.of(module).convolution and x.shape[1] == self._examples != x.shape[0]
        return x.transpose(0, 1) if second else x

    def add(self, step: Pass) -> None:
        self._called.clear()
        self._recur()

    def _recur(self) -> None:
        """Add all means that are ready."""
        for name, calls in self._calls.items():
            if len(calls) == 1:
                for means in calls[0].ready:
                    self._add(name, calls[0], means)
            else:
                ready = [[mean for means in call.ready for mean in means.split(1)] for call in calls]
                for group in itertools.zip_longest(*ready):
                    for call, mean in zip(calls, group, strict=True):
                        if mean is not None:
                            self._add(name, call, mean)
            for call in calls:
                call.ready.clear()

    def _add(self, name: str, call: _Call, means: Tensor) -> None:
        assert call.module is not None
        for piece in means.split(kinds.examples_at_once(call.module, means)):
            rows = complete(kinds.mean_rows(call.module, piece), call.layer)
            if name not in self._recursions:
                damping = recursion.DAMPING_CONVOLUTION if call.layer.convolution else recursion.DAMPING
                self._recursions[name] = MeanRecursion(rows.shape[0], rows.shape[2], damping)
            self._recursions[name].add(rows)

    def value(self, found: Found) -> dict[str, Spectrum | Diagonal]:
        for calls in self._calls.values():
            for call in calls:
                call.ready += call.means.rest()
        self._recur()
        return for_layers(self._client, found.layers, lambda layer: self._matrix(layer, found))

    def _matrix(self, layer: Layer, found: Found) -> Spectrum | Diagonal:
        if layer.one_hot:
            return projector(self._tokens.matrix(layer, found), recursion.DAMPING)
        if layer.name in self._recursions:
            return self._recursions[layer.name].spectrum().to(device=torch.device("cpu"))
        groups, _, d = layer.shape(found.weights)
        return Spectrum.zero(groups, d)


@dataclass
class _Call:
    """The first, second, … time that a batch calls a layer."""

    layer: Layer
    means: Means
    module: nn.Module | None = None
    ready: list[Tensor] = field(default_factory=list)
    """Means that no recursion has yet, each [groups, ...]."""
