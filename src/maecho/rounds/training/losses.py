"""What a client minimises on its own data. Under label skew the plain cross-entropy pushes down every class that the
client does not have; the others hold against that, but for the squared error, which is for heads that are fixed.

Every loss sees one step of several clients at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from maecho.options import NOT_NEGATIVE, POSITIVE, number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Step:
    """What a loss may read: the examples of one step of every client."""

    logits: Float[Tensor, "clients batch classes"]
    labels: Int[Tensor, "clients batch"]
    shares: Float[Tensor, "clients classes"]
    """Which share of each client's examples has each class."""
    counted: Bool[Tensor, "clients batch"] | None = None
    """Which entries are examples; None: all. What a loss says about the others is not read."""
    teacher: Float[Tensor, "clients batch classes"] | None = None
    """The logits of the global model of the round's start, for losses that need them."""

    @property
    def own(self) -> Bool[Tensor, "clients 1 classes"]:
        """Which classes each client has."""
        return (self.shares > 0).unsqueeze(1)

    def cross_entropy(self, logits: Tensor) -> Float[Tensor, "clients batch"]:
        """−log softmax of these logits, at the labels."""
        found = functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), reduction="none")
        return found.view(self.labels.shape)

    def divergence(self, among: Tensor, temperature: float = 1.0) -> Float[Tensor, "clients batch"]:
        """KL of the softmax of the teacher from that of the client, over some of the classes; 0 where there are
        none."""
        assert self.teacher is not None
        least = torch.finfo(self.logits.dtype).min
        q, p = ((z / temperature).masked_fill(~among, least).log_softmax(-1) for z in (self.teacher, self.logits))
        apart = (q.exp() * (q - p)).masked_fill(~among, 0.0).sum(-1)
        return apart.masked_fill(~among.any(-1), 0.0)


def shares(labels: Int[Tensor, " examples"], classes: int, like: Tensor) -> Float[Tensor, " classes"]:
    """Which share of these examples has each class, in the precision of `like`."""
    return labels.bincount(minlength=classes).to(like.dtype) / len(labels)


class Loss(Protocol):
    """One loss for every example."""

    needs_teacher: ClassVar[bool]

    def __call__(self, step: Step) -> Float[Tensor, "clients batch"]: ...


@dataclass(frozen=True)
class CrossEntropy:
    """−log softmax(z)_y."""

    needs_teacher: ClassVar[bool] = False

    def __call__(self, step: Step) -> Tensor:
        return step.cross_entropy(step.logits)


@dataclass(frozen=True)
class SquaredError:
    """‖z − e_y‖², with e_y the unit vector of the label. Made for a head that is fixed (`maecho.rounds.Sphere`)."""

    needs_teacher: ClassVar[bool] = False

    def __call__(self, step: Step) -> Tensor:
        wanted = functional.one_hot(step.labels, step.logits.shape[-1]).to(step.logits.dtype)
        return (step.logits - wanted).square().sum(-1)


@dataclass(frozen=True)
class OwnClasses:
    """−log softmax over the client's own classes alone. Rows of other classes get no gradient. With a single class
    there is nothing to learn, and the client returns what it got."""

    needs_teacher: ClassVar[bool] = False

    def __call__(self, step: Step) -> Tensor:
        return step.cross_entropy(step.logits.masked_fill(~step.own, -torch.inf))


@dataclass(frozen=True)
class RestrictedSoftmax:
    """FedRS (Li and Zhan, KDD 2021): −log softmax(α ∘ z)_y, with α = 1 for own classes and `scale` for the others."""

    scale: float = 0.5
    needs_teacher: ClassVar[bool] = False

    def __post_init__(self) -> None:
        number("scale", self.scale, "from 0 to 1", 0, 1)

    def __call__(self, step: Step) -> Tensor:
        return step.cross_entropy(step.own.to(step.logits.dtype).clamp(min=self.scale) * step.logits)


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

    def __call__(self, step: Step) -> Tensor:
        others = functional.one_hot(step.labels, step.logits.shape[-1]) == 0
        apart = step.divergence(others, self.temperature)
        return step.cross_entropy(step.logits) + self.beta * self.temperature**2 * apart


@dataclass(frozen=True)
class VacantDistillation:
    """FedVLS (Guo et al., AAAI 2025), with π_c the share of class c among the client's examples and C classes:

        −log softmax(z + log π)_y  +  λ KL(q ‖ p)  +  μ Σ_c π_c log (mean over the step of exp(u_c))

    q and p are the softmax of the global model and of the client's over the classes that the client does not have. The
    last term holds down the scores of classes that are not the label: u_c = z_c − log π_c − log C, and 0 where c is the
    label. A class that nobody has counts as π = 10⁻⁹ in the first term, and the formulas and λ, μ are those of the
    authors' code.
    """

    distillation: float = 0.1
    suppression: float = 0.005
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("distillation", self.distillation, NOT_NEGATIVE, 0)
        number("suppression", self.suppression, NOT_NEGATIVE, 0)

    def __call__(self, step: Step) -> Tensor:
        z = step.logits
        prior = (step.shares + 1e-9).log().unsqueeze(1)
        found = step.cross_entropy(z + prior)
        found = found + self.distillation * step.divergence((~step.own).expand_as(z))
        label = functional.one_hot(step.labels, z.shape[-1]) == 1
        u = (z - prior - math.log(z.shape[-1])).masked_fill(label, 0.0)
        count = torch.full_like(z[:, 0, 0], z.shape[1])
        if step.counted is not None:
            u, count = u.masked_fill(~step.counted.unsqueeze(-1), -torch.inf), step.counted.sum(1)
        u = u.masked_fill(~step.own, 0.0)  # π_c is 0, and u may be large
        held = (step.shares * (u.logsumexp(1) - count.log().unsqueeze(1))).sum(1)
        return found + self.suppression * held.unsqueeze(1)


LOSSES: dict[str, Loss] = {
    "cross-entropy": CrossEntropy(),
    "own-classes": OwnClasses(),
    "fedrs": RestrictedSoftmax(),
    "fedntd": NotTrueDistillation(),
    "fedvls": VacantDistillation(),
    "squared-error": SquaredError(),
}
"""Name -> the loss with its published settings."""
