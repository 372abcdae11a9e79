"""Fits one unit by least squares, on the inputs that the merged network itself will see.

    min_W Σ_i Σ ‖W h − z_i‖² + ε ‖W − W̄‖²   =>   W = W̄ + (Σ z hᵀ − W̄ Σ h hᵀ) (Σ h hᵀ + εI)⁻¹

h is the merged network's input to the unit, and z_i is the output of client i's own unit for the same sample. Only
totals over all clients are needed. The head may be fitted to the labels instead, from the same Σ h hᵀ and from Σ y hᵀ:

    min_W Σ ‖W h − y‖² + ε ‖W‖²,   times a = √(Σ ‖z − z̄‖² / Σ ‖W h − mean of W h‖²)

Scores near 0 and 1 would give every class nearly the same probability. With the factor a they are as large as the
clients' own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from maecho.echo.totals import ByClass, UnitSums
from maecho.linalg.symmetric import Dense, Diagonal, Total, eigenvalues
from maecho.network.norms import epsilon
from maecho.network.units import Unit
from maecho.options import NOT_NEGATIVE, number, one_of

if TYPE_CHECKING:
    from jaxtyping import Float

Head = Literal["regression", "ridge", "lda"]
HEADS = ("regression", "ridge", "lda")

DISAGREEING = 0.01
"""Clients whose disagreement is at least this large are fitted to their labels as the options say. Below it labels
count less, and not at all where the clients agree: their common model is then the right answer."""


@dataclass(frozen=True)
class Regression:
    """How units are fitted.

    Args:
        ridge: ε = ridge · (inputs / examples) · tr Σ h hᵀ. A wide layer can overfit more, so its ε is larger. The
            constant input of a bias counts by itself, as one input, so the result does not depend on units.
        head: how the last layer is fitted: by "regression" like the rest, by "ridge" to the labels, with scores as
            large as the clients' own, or by "lda" (linear discriminant analysis: one Gaussian for each class, one
            covariance for all).
        pull: how far fully connected layers between the first and the last are fitted to the mean of z over the
            example's class instead of z itself, in [0, 1]. Much of the output of badly trained clients has nothing to
            do with the class, and the mean removes it. Well-trained clients lose nothing by it.

    In three cases the head is fitted by regression and the pull is 0: without labels, if the rows of the last layer are
    not the classes, and with a single client, whose own network is then the right answer. The more the clients agree,
    the closer a fit comes to that; see DISAGREEING. The defaults were found on held-out training data by
    benchmarks/echo_settings.py.
    """

    ridge: float = 5e-4
    head: Head = "ridge"
    pull: float = 0.5

    def __post_init__(self) -> None:
        number("ridge", self.ridge, NOT_NEGATIVE, 0)
        one_of("head", self.head, HEADS)
        number("pull", self.pull, "in [0, 1]", 0, 1)

    @property
    def plain(self) -> Regression:
        """The same ridge, with every layer fitted to z alone."""
        return replace(self, head="regression", pull=0.0)

    def matrix(
        self,
        unit: Unit,
        sums: UnitSums,
        prior: Float[Tensor, "g o d"],
        examples: float,
        is_head: bool = False,
    ) -> Float[Tensor, "g o d"]:
        """The unit's [W b] from its sums. Sums by class are used if examples have labels."""
        gram, cross = gram_of(unit, sums), sums.cross
        ridge = gram.ridge(self.ridge, examples) + sums.floor
        damped, by_class = gram.plus_identity(ridge), sums.by_class
        trust = min(1.0, sums.disagreement / DISAGREEING)
        if by_class is not None and not is_head:
            assert by_class.outputs is not None
            means, pull = by_class.outputs / by_class.counts.clamp(min=1)[:, None], trust * self.pull
            cross = (1 - pull) * cross + pull * (means.mT @ by_class.labels)
        gap = cross - gram.after(prior)
        if by_class is None or not is_head or self.head == "regression":
            return prior + damped.divide(gap)
        # Both heads from one factorisation.
        of_gap, of_labels = damped.divide(torch.cat([gap, by_class.labels.unsqueeze(0)], 1)).split(len(gap[0]), 1)
        of_outputs = prior + of_gap
        if self.head == "lda":
            of_labels = discriminant(sums.gram[0], by_class.labels, by_class.counts, ridge[0], unit.bias).unsqueeze(0)
        else:
            of_labels = of_labels * scale(of_labels[0], of_outputs[0], sums)
        return torch.lerp(of_outputs, of_labels, trust)


def gram_of(unit: Unit, sums: UnitSums) -> Total:
    """Σ h hᵀ in the form of a sum over clients. For one-hot rows it is diagonal, and only the diagonal [g, 1, d] was
    sent."""
    return Diagonal(sums.gram.squeeze(-2)) if unit.layer.one_hot else Dense(sums.gram, bias=unit.bias)


def disagreement(unit: Unit, sums: UnitSums, average: Float[Tensor, "g o d"]) -> float:
    """Σ ‖z − W̄h‖² / Σ ‖z‖², at most 1. It is 1 if the clients did not send Σ ‖z‖²."""
    if sums.by_class is None or sums.by_class.squares is None:
        return 1.0
    whole = sums.by_class.squares[0]
    apart = whole - 2 * (average * sums.cross).sum() + (average * gram_of(unit, sums).after(average)).sum()
    return min(1.0, max(0.0, float(apart / whole))) if whole > 0 else 0.0


def scale(W: Float[Tensor, "k d"], of_outputs: Float[Tensor, "k d"], sums: UnitSums) -> float:
    """The factor that gives the scores W h the size of the clients' own outputs z.

    Both are centred, as an offset that all classes share changes no probability. Their mean squares become equal. If
    the clients did not send Σ ‖z − z̄‖², the scores of the head that was fitted to z stand for z.
    """
    assert sums.by_class is not None

    def square(V: Tensor) -> Tensor:
        V = V - V.mean(0)
        return (V * (V @ sums.gram[0])).sum()

    squares = sums.by_class.squares
    own, merged = square(of_outputs) if squares is None else squares[1], square(W)
    return math.sqrt(own / merged) if own > 0 and merged > 0 else 1.0


def repaired(unit: Unit, sums: UnitSums, examples: Tensor) -> UnitSums:
    """Repair sums that hold noise for privacy. Afterwards they could be the sums of real data.

    Σ h hᵀ becomes positive semidefinite again. Clipping has made examples smaller, and with them the 1 that a bias
    reads. So h and z are multiplied by the factor after which the mean square of that input is 1 again. The floor is
    the root mean square of the eigenvalues of the noise. The ridge is never smaller than the floor. Otherwise the
    solution would depend mostly on the noise (on digits at ε = 8: 24 per cent right without a floor, 84 with it).
    """
    assert sums.noise is not None
    deviation = sums.noise.sqrt()
    if unit.layer.one_hot:
        gram, floor = sums.gram.clamp(min=0), deviation
    else:
        s, U = eigenvalues(sums.gram)
        gram, floor = (U * s.unsqueeze(-2)) @ U.mT, math.sqrt(sums.gram.shape[-1]) * deviation
    ones = gram[..., -1, -1].mean() if unit.bias else examples
    square = float(examples / ones) if ones > 0 else 1.0
    root, by_class = math.sqrt(square), sums.by_class
    if by_class is not None:
        outputs = None if by_class.outputs is None else by_class.outputs * root
        by_class = ByClass(by_class.labels * root, by_class.counts.clamp(min=0), outputs)
    return UnitSums(gram * square, sums.cross * square, by_class, floor=floor * square)


def discriminant(
    gram: Float[Tensor, "d d"],
    labels: Float[Tensor, "k d"],
    counts: Float[Tensor, " k"],
    ridge: Tensor,
    bias: bool,
) -> Float[Tensor, "k d"]:
    """Linear discriminant analysis: the rows [w b] of log π_k + μ_kᵀ Σ⁻¹ h − ½ μ_kᵀ Σ⁻¹ μ_k.

    If the layer has no bias, this is the linear function of h that comes nearest to these scores on the clients' data.
    A class that no client has gets the lowest score of all.
    """
    n = counts.sum().clamp(min=1)
    held = counts > 0.5  # if counts were masked, round-off keeps their total from being whole
    sums, G = (labels[:, :-1], gram[:-1, :-1]) if bias else (labels, gram)
    means = sums * held[:, None] / counts.clamp(min=1)[:, None]
    within = (G - (means.mT * counts) @ means) / n
    W = Dense(within.unsqueeze(0)).plus_identity(ridge[..., : len(within)] / n).divide(means.unsqueeze(0))[0]
    b = torch.log(counts.clamp(min=0.5) / n) - 0.5 * (W * means).sum(-1)
    b = torch.where(held, b, b.min() - 1)
    if bias:
        return torch.cat([W, b[:, None]], 1)
    mean_of_all = sums.sum(0, keepdim=True)
    return W + Dense(gram.unsqueeze(0)).plus_identity(ridge).divide((b[:, None] * mean_of_all).unsqueeze(0))[0]


def write(
    unit: Unit, matrix: Float[Tensor, "g o d"], gram: Tensor, model: nn.Module, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The unit's parameters, as entries of a state_dict with the dtypes of `state`.

    A BatchNorm's running mean and variance become those of its inputs in the merged network. They follow from Σ h hᵀ.
    Its scale and shift are set so that the layer and the BatchNorm together compute `matrix`.
    """
    if unit.norm is None:
        return unit.layer.write(matrix, state)
    W, b = matrix[..., :-1], matrix[..., -1]
    n = gram[..., -1, -1].clamp(min=1)
    center = gram[..., :-1, -1] / n[:, None]
    spread = gram[..., :-1, :-1] / n[:, None, None] - center.unsqueeze(-1) * center.unsqueeze(-2)
    mean = torch.einsum("god,gd->go", W, center)
    variance = torch.einsum("god,gde,goe->go", W, spread, W).clamp(min=0)
    out = replace(unit.layer, bias=None).write(W, state)
    if unit.layer.bias is not None:
        out[unit.layer.bias] = torch.zeros_like(b).flatten()  # the shift of the norm takes its place
    scale = torch.sqrt(variance + epsilon(model.get_submodule(unit.norm)))
    for key, value in {"weight": scale, "bias": mean + b, "running_mean": mean, "running_var": variance}.items():
        out[f"{unit.norm}.{key}"] = value.flatten()
    return {name: tensor.to(state[name].dtype).contiguous() for name, tensor in out.items()}


def fitted(
    regression: Regression,
    unit: Unit,
    sums: UnitSums,
    prior: Float[Tensor, "g o d"],
    model: nn.Module,
    examples: float,
    is_head: bool = False,
) -> dict[str, Tensor]:
    """Fit the unit to its sums. The result is the unit's parameters, as entries of the model's state_dict."""
    state = model.state_dict()
    module = model.get_submodule(unit.name)
    if not (unit.diagonal and "running_mean" in module.state_dict()):
        return write(unit, regression.matrix(unit, sums, prior, examples, is_head), sums.gram, model, state)
    # A BatchNorm by itself: sums over its inputs x become sums over x̂ = (x − m)/s, by (x̂, 1) = T (x, 1).
    gram = sums.gram
    n = gram[:, 1, 1].clamp(min=1)
    m = gram[:, 0, 1] / n
    v = (gram[:, 0, 0] / n - m**2).clamp(min=0)
    s = torch.sqrt(v + epsilon(module))
    T, back = torch.zeros_like(gram), torch.zeros_like(gram)
    T[:, 0, 0], T[:, 0, 1], T[:, 1, 1] = 1 / s, -m / s, 1
    back[:, 0, 0], back[:, 0, 1], back[:, 1, 1] = s, m, 1
    moved = UnitSums(T @ gram @ T.mT, sums.cross @ T.mT)
    prefix = f"{unit.name}." if unit.name else ""
    out = unit.layer.write(regression.matrix(unit, moved, prior @ back, examples), state)
    out |= {f"{prefix}running_mean": m, f"{prefix}running_var": v}
    return {name: tensor.to(state[name].dtype) for name, tensor in out.items()}
