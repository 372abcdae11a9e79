"""What a client minimises on its own data. Under label skew the plain cross-entropy pushes down every class that the
client does not have; all but the first of these hold against that.

Logits are [clients, batch, classes], labels [clients, batch]. `own` says which classes each client has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from maecho.options import NOT_NEGATIVE, POSITIVE, number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Loss(Protocol):
    """One loss for every example."""

    needs_teacher: ClassVar[bool]
    """Whether it reads the logits of the global model of the round's start."""

    def __call__(
        self,
        logits: Float[Tensor, "clients batch classes"],
        labels: Int[Tensor, "clients batch"],
        own: Bool[Tensor, "clients classes"],
        teacher: Float[Tensor, "clients batch classes"] | None,
    ) -> Float[Tensor, "clients batch"]: ...


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


@dataclass(frozen=True)
class CrossEntropy:
    """−log softmax(z)_y."""

    needs_teacher: ClassVar[bool] = False

    def __call__(self, logits: Tensor, labels: Tensor, own: Tensor, teacher: Tensor | None) -> Tensor:
        return _cross_entropy(logits, labels)


@dataclass(frozen=True)
class OwnClasses:
    """−log softmax over the client's own classes alone. Rows of other classes get no gradient. With a single class
    there is nothing to learn, and the client returns what it got."""

    needs_teacher: ClassVar[bool] = False

    def __call__(self, logits: Tensor, labels: Tensor, own: Tensor, teacher: Tensor | None) -> Tensor:
        return _cross_entropy(logits.masked_fill(~own.unsqueeze(1), -torch.inf), labels)


@dataclass(frozen=True)
class RestrictedSoftmax:
    """FedRS (Li and Zhan, KDD 2021): −log softmax(α ∘ z)_y, with α = 1 for own classes and `scale` for the others."""

    scale: float = 0.5
    needs_teacher: ClassVar[bool] = False

    def __post_init__(self) -> None:
        number("scale", self.scale, "from 0 to 1", 0, 1)

    def __call__(self, logits: Tensor, labels: Tensor, own: Tensor, teacher: Tensor | None) -> Tensor:
        alpha = own.to(logits.dtype).clamp(min=self.scale).unsqueeze(1)
        return _cross_entropy(alpha * logits, labels)


@dataclass(frozen=True)
class NotTrueDistillation:
    """FedNTD (Lee et al., NeurIPS 2022): cross-entropy + β τ² KL(q̃ ‖ p̃). q̃ and p̃ are the softmax at temperature τ
    over all classes but the true one, of the global model and of the client's."""

    beta: float = 1.0
    temperature: float = 1.0
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("beta", self.beta, NOT_NEGATIVE, 0)
        number("temperature", self.temperature, POSITIVE, 0)

    def __call__(self, logits: Tensor, labels: Tensor, own: Tensor, teacher: Tensor | None) -> Tensor:
        assert teacher is not None
        others = functional.one_hot(labels, logits.shape[-1]) == 0
        apart = _divergence(teacher, logits, others, self.temperature)
        return _cross_entropy(logits, labels) + self.beta * self.temperature**2 * apart


@dataclass(frozen=True)
class VacantDistillation:
    """FedVLS (Guo et al., 2024) in its first part: cross-entropy + λ KL(q ‖ p), both over the classes that the client
    does not have, of the global model and of the client's."""

    weight: float = 0.1
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("weight", self.weight, NOT_NEGATIVE, 0)

    def __call__(self, logits: Tensor, labels: Tensor, own: Tensor, teacher: Tensor | None) -> Tensor:
        assert teacher is not None
        vacant = ~own.unsqueeze(1).expand_as(logits)
        return _cross_entropy(logits, labels) + self.weight * _divergence(teacher, logits, vacant, 1.0)


def _divergence(teacher: Tensor, student: Tensor, among: Tensor, temperature: float) -> Tensor:
    """KL of the softmax of the teacher from that of the student, over some of the classes; 0 where there are none."""
    least = torch.finfo(student.dtype).min
    q, p = ((z / temperature).masked_fill(~among, least).log_softmax(-1) for z in (teacher, student))
    apart = (q.exp() * (q - p)).masked_fill(~among, 0.0).sum(-1)
    return apart.masked_fill(~among.any(-1), 0.0)


LOSSES: dict[str, Loss] = {
    "cross-entropy": CrossEntropy(),
    "own-classes": OwnClasses(),
    "fedrs": RestrictedSoftmax(),
    "fedntd": NotTrueDistillation(),
    "fedvls": VacantDistillation(),
}
"""Name -> the loss with its published settings."""
