"""The network that a server merges into. Its stages are fitted one by one; at the end it gives the merged model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.echo.fit import Regression, disagreement, fitted, repaired
from maecho.echo.messages import Answer, Opening, units_named
from maecho.echo.state import RelayState
from maecho.echo.totals import sums_of
from maecho.errors import InputError, text_of
from maecho.linalg.finite import is_finite
from maecho.network.layers import read
from maecho.network.packed.twin import copied, twin_of
from maecho.network.plain import plain
from maecho.network.units import Unit, network
from maecho.upload.merged import Merged


class MergedNetwork:
    """A copy of the model, with the weights that are merged so far.

    Args:
        model: a network of the clients' architecture. It is not changed.
        prior: a state_dict that the ridge pulls to, instead of the clients' average.
    """

    def __init__(self, model: nn.Module, prior: Mapping[str, Tensor] | None = None):
        model = plain(model)
        self._original = model
        self._twin = twin_of(model)
        self.network = self._twin.network
        self.units = network(self.network)
        self._aliases = read(self.network).aliases
        self._prior = None if prior is None else self._loaded(prior, "prior")

    def open(self, opening: Opening, total: Answer) -> RelayState:
        """Read from the first answers how the network runs, and load the average of the weights that no sum is taken
        of."""
        count = max(opening.stages.values(), default=0) + 1
        stages = tuple(
            units_named({n: opening.joins.get(n) for n, number in opening.stages.items() if number == k}, self.units)
            for k in range(count)
        )
        plain = {
            name: tensor / total.examples if tensor.is_floating_point() else tensor
            for name, tensor in opening.plain.items()
        }
        for name, tensor in self.network.state_dict().items():
            if tensor.is_complex() and name in plain:
                if plain[name].shape != (*tensor.shape, 2):
                    got = tuple(plain[name].shape)
                    raise InputError(f"answers must hold both parts of the complex {name!r}, got the shape {got}")
                plain[name] = torch.view_as_complex(plain[name].contiguous())
        known = self._parameters(stages) | plain.keys() | self._aliases.keys()
        for name in self.network.state_dict():
            if name not in known:
                raise InputError(f"answers must be of the server's network, got none for {name!r}")
        self.load(plain)
        return RelayState(stages, opening.head, round(float(total.clients)) == 1, frozenset(plain))

    def load_model(self, state: Mapping[str, Tensor], without: Sequence[Sequence[Unit]]) -> frozenset[str]:
        """Load the weights of a model that was merged before, but not those of these stages. Returns the names of the
        loaded weights."""
        left_out = self._parameters(without) | self._aliases.keys()
        before = self._loaded(state, "start").state_dict()
        kept = {name: tensor for name, tensor in before.items() if name not in left_out}
        self.load(kept)
        return frozenset(kept)

    def fit(self, stage: Sequence[Unit], total: Answer, regression: Regression, head: str | None) -> frozenset[str]:
        """Fit the units of a stage to the clients' totals. Returns the names of the weights that are final now."""
        new: dict[str, Tensor] = {}
        device = devices.of(self.network)
        examples = total.examples.to(device)
        for unit in stage:
            sums = sums_of(unit, tuple(unit.matrix(self.network).shape), total.of(unit.name), device)
            if sums.by_class is not None and sums.by_class.outputs is None and unit.name != head:
                raise InputError(f"sums by class of {unit.name!r} must hold its outputs, got none")
            prior = total.of(unit.name).prior.to(device) / examples
            if sums.noise is not None:
                sums = repaired(unit, sums, examples)
            sums = replace(sums, disagreement=disagreement(unit, sums, prior))
            if self._prior is not None:
                prior = unit.matrix(self._prior).to(prior)
            new |= fitted(regression, unit, sums, prior, self.network, float(examples), unit.name == head)
        lost = [name for name, tensor in new.items() if not is_finite(tensor)]
        if lost:
            raise InputError(f"the fit must be finite, got NaN or infinity in {lost[0]!r}")
        self.load(new)
        return frozenset(new)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load these weights. On an error none of them is loaded."""
        state = self.network.state_dict()
        for name, tensor in tensors.items():
            if name not in state or state[name].shape != tensor.shape:
                raise InputError(f"answers must be of the server's network, got {name!r} {tuple(tensor.shape)}")
        for name, tensor in tensors.items():
            state[name].copy_(tensor)

    def result(self, stages: Sequence[Sequence[Unit]]) -> Merged:
        """The merged model, with the names of the original's weights. The parts of an attention count as fitted
        together."""
        state = self.network.state_dict()
        known = self._parameters(stages) | self._aliases.keys()
        return Merged(
            {name: tensor.clone() for name, tensor in self._twin.packed(state).items()},
            averaged=self._twin.packed_names(name for name in state if name not in known),
        )

    def _parameters(self, stages: Sequence[Sequence[Unit]]) -> set[str]:
        return {name for stage in stages for unit in stage for name in unit.parameters(self.network)}

    def _loaded(self, state: Mapping[str, Tensor], what: str) -> nn.Module:
        twin = copied(self._original)
        try:
            twin.load_state_dict(dict(state))
        except RuntimeError as error:
            raise InputError(f"{what} must be a state_dict of the model, got: {text_of(error)}") from error
        return twin_of(twin).network
