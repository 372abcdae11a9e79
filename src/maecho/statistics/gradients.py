"""Log p(y | x) back through a model: how much each weight matters to what the model says about its data.

Two statistics, from one forward and a few backward passes a batch, with θ the weights and z a layer's outputs:

    fisher      F = Σ_x E_y (∂ log p(y|x) / ∂θ)²                       the diagonal of the Fisher information
    gradients   B = Σ_x E_y Σ_l (∂ log p / ∂z_l) (∂ log p / ∂z_l)ᵀ     the other half, beside the Gram, of A ⊗ B

What E_y means is in `directions.py`, the way to squares of every example's gradient in `per_example.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maecho.errors import UploadError
from maecho.linalg.spectra import Spectrum
from maecho.network import kinds, layers
from maecho.network.directions import Directions, Labels
from maecho.network.forward import Pass, check_labels
from maecho.network.hooks import watching
from maecho.network.per_example import CHUNK, LongWay, squares, token_squares


@dataclass(frozen=True)
class Call:
    """One use of a layer: what came in and what went out."""

    layer: layers.Layer
    module: nn.Module
    x: Tensor
    z: Tensor

    def examples_first(self, n: int) -> bool:
        return kinds.examples_first(self.module, self.x, self.z, n)


class Gradients:
    """Gathered a batch at a time, in float64."""

    def __init__(
        self,
        model: nn.Module,
        architecture: layers.Architecture,
        wanted: set[str],
        labels: Labels,
        generator: torch.Generator | None,
        client: str,
    ):
        self._model, self._architecture, self._wanted = model, architecture, wanted
        self._labels, self._generator, self._client = labels, generator, client
        self._parameters = {
            architecture.aliases.get(name, name): p for name, p in model.named_parameters() if p.is_floating_point()
        }
        self._found = {layer.name: layer for layer in architecture.layers.values()}
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._long_way = LongWay(model, device)
        self._calls: list[Call] = []
        self._probed = False
        self._mixed: set[str] = set()
        self._squares: dict[str, Tensor] = {}
        self._long: dict[str, Tensor] = {}
        self._grams: dict[str, Tensor] = {}
        self.busy = False
        """While it runs the model for itself, when nobody else should look."""
        self.reason: str | None = None
        """Why nothing can be said."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Every parameter differentiable, a hook behind every layer; afterwards all is as it was."""
        frozen = [p for p in self._parameters.values() if not p.requires_grad]
        try:
            for p in frozen:
                p.requires_grad_(True)
            with watching(self._model, self._architecture.layers, after=self._keep):
                yield
        finally:
            for p in frozen:
                p.requires_grad_(False)

    def _keep(self, name: str, module: nn.Module, x: Tensor, z: Tensor) -> Tensor | None:
        if self.busy or not z.requires_grad:
            return None
        self._calls.append(Call(self._architecture.layers[name], module, x.detach(), z))
        return z.clone()  # what follows may change it in place, and gradients are wanted of what it was

    def add(self, step: Pass) -> None:
        calls, self._calls = self._calls, []
        self.reason = self.reason or self._complaint(step)
        if self.reason or not step.output.requires_grad:
            return
        if step.labels is not None and self._labels == "observed":
            check_labels(step.labels, step.output.shape[-1], self._client)
        if not step.output.isfinite().all():
            raise UploadError(f"{self._client}: the model's outputs must be finite, got NaN or infinity")
        try:
            self._add(step, calls)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UploadError(
                f"{self._client}: the statistics fisher and gradients need a model that can be differentiated one "
                f"example at a time, got an error: {reason}"
            ) from error

    def _complaint(self, step: Pass) -> str | None:
        output = step.output
        if not (isinstance(output, Tensor) and output.is_floating_point() and output.dim() == 2):
            return "the model's output is not one row of class scores an example"
        if len(output) != step.size or output.shape[-1] < 2:
            return f"the model's output is not two or more class scores an example, but {tuple(output.shape)}"
        if self._labels == "observed" and step.labels is None:
            return "the batches carry no whole-number label for every example"
        return None

    def _add(self, step: Pass, calls: list[Call]) -> None:
        directions = Directions(step.output, self._labels, step.labels, self._generator)
        sizes = [float(v.square().sum()) for v in directions]
        largest = sizes.index(max(sizes))
        fisher = "fisher" in self._wanted
        if fisher and not self._probed:
            self._probe(step, calls, directions[largest])
        fast = self._fast(step.size, calls) if fisher else {}
        used: set[str] = set()
        for index in sorted(range(len(directions)), key=lambda i: i != largest):
            # The first pass, of the largest direction, also asks torch for the sum, to see that no use was missed.
            checked = list(self._parameters.values()) if fisher and index == largest else []
            found = self._backward(step.output, directions[index], [*(c.z for c in calls), *checked])
            deltas = dict(zip(map(id, calls), found[: len(calls)], strict=True))
            if "gradients" in self._wanted:
                self._add_grams(calls, deltas)
            sums = dict(zip(self._parameters, found[len(calls) :], strict=True)) if checked else None
            used |= {name for name, total in (sums or {}).items() if total is not None}
            for name, own in list(fast.items()):
                F, total = self._layer_squares(own, deltas, step.size)
                if sums is not None and not self._agrees(self._found[name], total, F, sums, step):
                    del fast[name]
                else:
                    self._squares[name] = self._squares[name].add_(F) if name in self._squares else F
        if fisher:
            done = {part for name in fast for part in (self._found[name].weight, self._found[name].bias)}
            self._go_the_long_way(step, used - done, directions)

    def _backward(self, output: Tensor, v: Tensor, of: list[Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(output, of, v.to(output), retain_graph=True, allow_unused=True) if of else ()

    def _probe(self, step: Pass, calls: list[Call], v: Tensor) -> None:
        """Layers where the first example reaches more than the first entry: other axes come first, or examples mix."""
        only_first = torch.zeros_like(v)
        only_first[0] = v[0]
        for call, delta in zip(calls, self._backward(step.output, only_first, [c.z for c in calls]), strict=True):
            if delta is not None and bool(delta[1:].any()):
                self._mixed.add(call.layer.name)
        self._probed = step.size > 1

    def _fast(self, n: int, calls: list[Call]) -> dict[str, list[Call]]:
        """The uses of each layer whose squares follow from its rows."""
        grouped: defaultdict[str, list[Call]] = defaultdict(list)
        for call in calls:
            grouped[call.layer.name].append(call)
        return {
            name: own
            for name, own in grouped.items()
            if name not in self._mixed and all(call.examples_first(n) for call in own)
        }

    def _layer_squares(self, own: list[Call], deltas: dict[int, Tensor | None], n: int) -> tuple[Tensor, Tensor]:
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
            rows, gone = [], []
            for call, delta in used:
                piece = slice(start, start + size)
                found, g = kinds.rows(call.module, call.x[piece]), kinds.output_rows(call.module, delta[piece])
                count = len(call.x[piece])
                if not layer.one_hot:
                    found = layers.complete(found, layer)
                g = (g.cpu() if g.device.type == "mps" else g).double()
                rows.append(found.reshape(groups, count, found.shape[1] // count, *found.shape[2:]))
                gone.append(g.reshape(groups, count, -1, out))
            x, g = torch.cat(rows, 2), torch.cat(gone, 2)
            padding = kinds.frozen_token(own[0].module)
            parts = token_squares(x[0].to(g.device), g[0], d, padding) if layer.one_hot else squares(x, g)
            F += parts[0].cpu()
            total += parts[1].cpu()
        return F, total

    def _agrees(
        self, layer: layers.Layer, total: Tensor, F: Tensor, sums: dict[str, Tensor | None], step: Pass
    ) -> bool:
        """Whether the layer's rows account for the whole gradient: they miss a weight that is used elsewhere too."""
        torch_says = {}
        for name in (layer.weight, layer.bias):
            if name is not None:
                found = sums[name]
                torch_says[name] = torch.zeros_like(self._parameters[name]) if found is None else found
        gap = float((layer.matrix(torch_says).cpu().double() - total).norm())
        # By Cauchy and Schwarz a sum over n examples is at most this long.
        scale = math.sqrt(float(F.sum()) * step.size)
        return gap <= math.sqrt(torch.finfo(step.output.dtype).eps) * scale

    def _add_grams(self, calls: list[Call], deltas: dict[int, Tensor | None]) -> None:
        for call in calls:
            delta = deltas[id(call)]
            if delta is not None:
                g = kinds.output_rows(call.module, delta)
                g = (g.cpu() if g.device.type == "mps" else g).double()
                B, name = g.mT @ g, call.layer.name
                self._grams[name] = self._grams[name].add_(B) if name in self._grams else B

    def _go_the_long_way(self, step: Pass, rest: set[str], directions: Directions) -> None:
        first = {id(p): name for name, p in self._model.named_parameters()}
        names = {first[id(p)]: name for name, p in self._parameters.items() if name in rest}
        if not names:
            return
        self.busy = True
        try:
            found = self._long_way.squares(step.inputs, [v.to(step.output) for v in directions], list(names))
        finally:
            self.busy = False
        for name, F in found.items():
            kept = names[name]
            self._long[kept] = self._long[kept].add_(F) if kept in self._long else F

    def fisher(self) -> dict[str, Tensor]:
        """By weight name, every floating parameter."""
        F = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self._parameters.items()}
        for name, found in self._squares.items():
            for part, value in self._found[name].write(found, F).items():
                F[part] = F[part] + value
        for name, found in self._long.items():
            F[name] = F[name] + found
        return F

    def grams(self) -> dict[str, Spectrum]:
        """By layer; of rank 0 where nothing came back."""
        made = {}
        for name, layer in self._found.items():
            groups, out, _ = layer.shape(self._parameters)
            B = self._grams.get(name)
            made[name] = Spectrum.zero(groups, out) if B is None else Spectrum.of_dense(B.cpu())
        return made
