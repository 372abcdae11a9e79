"""The labels y for which gradients of log p(y | x) are taken, and the directions at the model's outputs that they give.

The labels y are those of the data, or drawn from the model's own predictions. With the model's own, the squares of
gradients are the Fisher information. It needs no labels of the data, and it is the curvature of the loss at the
client's weights. Squares of gradients for the labels of the data are neither (Kunstner et al., NeurIPS 2019). Let p be
the softmax of the outputs and e_c a unit vector. Then ∂ log p_c / ∂output = e_c − p, and each choice of labels is a few
directions v with Σ_v v vᵀ = E_y (e_y − p)(e_y − p)ᵀ:

    expected    √p_c (e_c − p) for each class c: exact, one backward pass for each class
    sampled     Σ_c ±√p_c (e_c − p) with random signs: the same on average, one backward pass in all. A label drawn
                from p is right on average too, but a confident model hardly ever draws the labels that matter
    observed    e_y − p for the label y of the data: the "empirical Fisher"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional

from maecho import devices

Labels = Literal["expected", "sampled", "observed"]
LABELS: tuple[Labels, ...] = ("expected", "sampled", "observed")


class Directions(Sequence[Tensor]):
    """The directions v [n, classes] of one batch. Each is computed when it is asked for, since all together take many
    times the memory of the outputs."""

    def __init__(self, output: Tensor, labels: Labels, y: Tensor | None, generator: torch.Generator | None):
        self._p = devices.double(output.detach()).softmax(-1)
        self._labels = labels
        self._y = None if y is None else y.to(self._p.device)
        if labels == "sampled":
            self._signs = torch.randint(0, 2, self._p.shape, generator=generator).to(self._p) * 2 - 1

    def __len__(self) -> int:
        return self._p.shape[-1] if self._labels == "expected" else 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        p = self._p
        if self._labels == "observed":
            assert self._y is not None
            return functional.one_hot(self._y, p.shape[-1]) - p
        if self._labels == "expected":
            unit = torch.zeros_like(p[0])
            unit[index] = 1
            return p[:, index : index + 1].sqrt() * (unit - p)
        root = self._signs * p.sqrt()
        return root - p * root.sum(-1, keepdim=True)
