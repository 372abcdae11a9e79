"""The weights of several clients, stacked, while all of them are trained at once: every layer is one batched
product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from maecho.rounds.training.local import Correction, Local
from maecho.rounds.training.losses import Step, shares

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Work:
    """One client's share of a round."""

    x: Tensor
    y: Tensor
    correction: Correction
    seed: int


@dataclass(frozen=True)
class Plan:
    """Which examples each client looks at in each step. Clients stand in the order of their number of steps, longest
    first."""

    examples: Int[Tensor, "clients steps batch"]
    sizes: Int[Tensor, "clients steps"]
    """How many entries count. Behind them stands example 0."""
    whole: bool
    """Whether every step looks at all examples in their order, so that nothing needs to be picked."""

    @classmethod
    def of(cls, works: Sequence[Work], local: Local) -> Plan:
        found = [local.batches(len(w.y), torch.Generator().manual_seed(w.seed)) for w in works]
        steps, width = len(found[0]), max(len(batch) for batches in found for batch in batches)
        whole = all(len(w.y) <= local.batch_size for w in works)
        examples = torch.zeros(len(works), steps, width, dtype=torch.int64)
        sizes = torch.zeros(len(works), steps, dtype=torch.int64)
        for c, batches in enumerate(found):
            for s, batch in enumerate(batches):
                examples[c, s, : len(batch)], sizes[c, s] = batch, len(batch)
        return cls(examples, sizes, whole)


@dataclass(frozen=True)
class Outer:
    """The gradient Σ_b left_b right_bᵀ of every client's linear layer, not yet multiplied out."""

    left: Float[Tensor, "clients batch o"]
    right: Float[Tensor, "clients batch i"]

    def dense(self) -> Float[Tensor, "clients o i"]:
        return self.left.mT @ self.right

    def squared_norms(self) -> Float[Tensor, " clients"]:
        """‖Lᵀ R‖² = ⟨L Lᵀ, R Rᵀ⟩."""
        return ((self.left @ self.left.mT) * (self.right @ self.right.mT)).flatten(1).sum(1).clamp(min=0)


Gradient = Tensor | Outer


class Stack:
    """The clients' weights, stacked, while they are trained."""

    def __init__(self, model: nn.Module, start: Mapping[str, Tensor], works: Sequence[Work], local: Local) -> None:
        self._model, self._works, self._local = model, works, local
        self._plan = Plan.of(works, local)
        most, count = max(len(w.y) for w in works), len(works)
        first = works[0]
        self._x = first.x.new_zeros(count, most, *first.x.shape[1:])
        self._y = first.y.new_zeros(count, most)
        for c, work in enumerate(works):
            self._x[c, : len(work.y)], self._y[c, : len(work.y)] = work.x, work.y
        model.load_state_dict(dict(start))
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._origin = {name: start[name].detach() for name in names}
        others = [*model.named_parameters(), *model.named_buffers()]
        self._fixed = {name: t.detach() for name, t in others if name not in names}
        self._stacked = {name: self._repeat(name) for name in self._trained()}
        self._velocity = {name: torch.zeros_like(t) for name, t in self._stacked.items()}
        self._pull = torch.tensor([w.correction.pull for w in works], dtype=first.x.dtype, device=first.x.device)
        model.eval()
        with torch.no_grad():
            classes = model(self._x[0, :1]).shape[-1]
            self._teacher = torch.stack([model(x) for x in self._x]) if local.loss.needs_teacher else None
        model.train()
        self._shares = torch.stack([shares(work.y, classes, first.x) for work in works])

    def _trained(self) -> list[str]:
        """The parameters that are stacked as they are."""
        return list(self._origin)

    def _repeat(self, name: str) -> Tensor:
        tensor = self._origin[name]
        return tensor.unsqueeze(0).expand(len(self._works), *tensor.shape).clone()

    def weights(self, place: int) -> dict[str, Tensor]:
        """The parameters of one client."""
        return {name: tensor[place].clone() for name, tensor in self._stacked.items()}

    def train(self) -> None:
        plan = self._plan
        for step in range(plan.sizes.shape[1]):
            active = int((plan.sizes[:, step] > 0).sum())
            index, sizes = plan.examples[:active, step].to(self._x.device), plan.sizes[:active, step].to(self._x.device)
            width = int(sizes.max())
            self._step(active, index[:, :width], sizes)

    def _step(self, active: int, index: Int[Tensor, "clients batch"], sizes: Int[Tensor, " clients"]) -> None:
        rows = torch.arange(active, device=index.device).unsqueeze(1)
        counted = torch.arange(index.shape[1], device=index.device) < sizes.unsqueeze(1)
        gradients = self._gradients(active, rows, index, counted, sizes)
        if self._corrected:
            whole = {name: dense(gradient) for name, gradient in gradients.items()}
            self._correct(active, whole)
            gradients = dict(whole)
        if self._local.clip is not None:
            norms = self._squared_norms(active, rows, index, gradients).sqrt()
            scale = (self._local.clip / (norms + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            for gradient in gradients.values():
                factor = gradient.left if isinstance(gradient, Outer) else gradient
                factor *= wide(scale, factor)
        for name, gradient in gradients.items():
            velocity = self._velocity[name][:active]
            if isinstance(gradient, Outer):
                velocity.baddbmm_(gradient.left.mT, gradient.right, beta=self._local.momentum)
            else:
                velocity.mul_(self._local.momentum).add_(gradient)
            self._stacked[name][:active].add_(velocity, alpha=-self._local.learning_rate)

    def _gradients(
        self, active: int, rows: Tensor, index: Tensor, counted: Bool[Tensor, "clients batch"], sizes: Tensor
    ) -> dict[str, Gradient]:
        parts = {name: tensor[:active].detach().requires_grad_() for name, tensor in self._stacked.items()}
        losses = self._losses(self._logits(parts, self._pick(self._x, rows, index)), rows, index, counted)
        return dict(self._backward(losses, counted, sizes, parts))

    def _logits(self, parts: Mapping[str, Tensor], x: Tensor) -> Float[Tensor, "clients batch classes"]:
        fixed = self._fixed

        def of_one(own: dict[str, Tensor], inputs: Tensor) -> Any:
            return functional_call(self._model, {**fixed, **own}, (inputs,))

        found: Tensor = vmap(of_one)(dict(parts), x)
        return found

    def _losses(self, logits: Tensor, rows: Tensor, index: Tensor, counted: Tensor) -> Float[Tensor, "clients batch"]:
        teacher = None if self._teacher is None else self._pick(self._teacher, rows, index)
        labels = self._pick(self._y, rows, index)
        return self._local.loss(Step(logits, labels, self._shares[: len(rows)], counted, teacher))

    def _pick(self, tensor: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        """What belongs to the examples of this step."""
        return tensor[: len(rows), : index.shape[1]] if self._plan.whole else tensor[rows, index]

    @staticmethod
    def _backward(losses: Tensor, counted: Tensor, sizes: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of each client's mean loss."""
        total = (losses.masked_fill(~counted, 0.0).sum(1) / sizes).sum()
        found = torch.autograd.grad(total, list(parts.values()), allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parts.items(), found, strict=True)}

    @property
    def _corrected(self) -> bool:
        return any(w.correction.pull or w.correction.offset is not None for w in self._works)

    def _correct(self, active: int, gradients: Mapping[str, Tensor]) -> None:
        pull, works = self._pull[:active], self._works[:active]
        for name, gradient in gradients.items():
            gradient += wide(pull, gradient) * (self._stacked[name][:active] - self._from(name))
            if any(w.correction.offset is not None for w in works):
                gradient += torch.stack([self._offset(w, name) for w in works])

    def _from(self, name: str) -> Tensor:
        return self._origin[name]

    def _offset(self, work: Work, name: str) -> Tensor:
        offset = work.correction.offset
        return torch.zeros_like(self._origin[name]) if offset is None else offset[name]

    def _squared_norms(
        self, active: int, rows: Tensor, index: Tensor, gradients: Mapping[str, Gradient]
    ) -> Float[Tensor, " clients"]:
        found = [
            g.squared_norms() if isinstance(g, Outer) else g.flatten(1).square().sum(1) for g in gradients.values()
        ]
        return torch.stack(found).sum(0)


def dense(gradient: Gradient) -> Tensor:
    return gradient.dense() if isinstance(gradient, Outer) else gradient


def wide(values: Tensor, like: Tensor) -> Tensor:
    """One value a client, for products with stacked tensors."""
    return values.reshape(-1, *[1] * (like.dim() - 1))
