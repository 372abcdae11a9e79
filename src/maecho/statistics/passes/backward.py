"""The backward passes of log p(y | x) that several statistics share.

Each batch takes one forward pass, and one backward pass for each direction v at the outputs (see
network/directions.py). They give

    fisher      F = Σ_x E_y (∂ log p(y|x) / ∂θ)²                       the diagonal of the Fisher information
    gradients   B = Σ_x E_y Σ_l (∂ log p / ∂z_l) (∂ log p / ∂z_l)ᵀ     the factor B of A ⊗ B; A is the Gram matrix

θ are the weights, z the outputs of a layer, and l counts the places where the layer is applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from maecho.errors import InputError, text_of
from maecho.linalg.finite import is_finite
from maecho.network.directions import Directions
from maecho.network.forward import Pass
from maecho.network.hooks import watching
from maecho.statistics.classes import NO_SCORES
from maecho.statistics.of_gradients import BackwardGatherer, Batch, Call, parameters
from maecho.statistics.statistic import Setting


class BackwardPasses:
    """Runs the backward passes of every batch for all gatherers that need them."""

    def __init__(self, setting: Setting, gatherers: Sequence[BackwardGatherer]):
        self._setting, self._gatherers = setting, gatherers
        self._parameters = parameters(setting)
        self._calls: list[Call] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every parameter is differentiable and every layer is watched. Afterwards all is as before."""
        frozen = [p for p in self._parameters.values() if not p.requires_grad]
        found, watch = self._setting.architecture.layers, self._setting.watch
        with watching(self._setting.model, found, after=self._remember, watch=watch):
            try:
                for p in frozen:
                    p.requires_grad_(True)
                yield
            finally:
                for p in frozen:
                    p.requires_grad_(False)

    def _remember(self, name: str, module: nn.Module, x: Tensor, z: Tensor) -> Tensor | None:
        if not z.requires_grad:
            return None
        self._calls.append(Call(self._setting.architecture.layers[name], module, x.detach(), z))
        return z.clone()  # the next module may change its input in place, but z itself must stay as it is

    def add(self, step: Pass) -> None:
        """Run the backward passes of the batch that has just run forward."""
        calls, self._calls = self._calls, []
        reason = next((g.reason for g in self._gatherers if g.reason), "") or self._complaint(step)
        for gatherer in self._gatherers:
            gatherer.reason = reason
        if reason or not step.output.requires_grad:
            return
        client = self._setting.client
        if not is_finite(step.output):
            raise InputError(f"{client}: the model's outputs must be finite, got NaN or infinity")
        try:
            self._add(step, calls)
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"{client}: for the statistics fisher and gradients the model must be differentiable one example at a "
                f"time, got an error: {text_of(error)}"
            ) from error

    def _complaint(self, step: Pass) -> str:
        """Why gradients of this batch cannot be used; empty if they can."""
        output = step.output
        if not (isinstance(output, Tensor) and output.is_floating_point() and output.dim() == 2):
            return NO_SCORES
        if len(output) != step.size or output.shape[-1] < 2:
            return f"the model's output is not two or more class scores an example, but {tuple(output.shape)}"
        return step.no_labels if self._setting.options.labels == "observed" else ""

    def _add(self, step: Pass, calls: Sequence[Call]) -> None:
        options = self._setting.options
        directions = Directions(step.output, options.labels, step.labels, options.generator)
        sizes = [float(v.square().sum()) for v in directions]
        largest = sizes.index(max(sizes))
        order = sorted(range(len(directions)), key=lambda i: i != largest)
        batch = Batch(step, calls, directions, order)
        for gatherer in self._gatherers:
            gatherer.begin(batch)
        of_parameters = any(gatherer.needs_sums for gatherer in self._gatherers)
        for index in order:
            checked = list(self._parameters.values()) if of_parameters and index == largest else []
            found = batch.backward(directions[index], [*(call.z for call in calls), *checked])
            deltas = dict(zip(map(id, calls), found[: len(calls)], strict=True))
            sums = dict(zip(self._parameters, found[len(calls) :], strict=True)) if checked else None
            for gatherer in self._gatherers:
                gatherer.see_gradients(batch, deltas, sums)
        for gatherer in self._gatherers:
            gatherer.end(batch)
