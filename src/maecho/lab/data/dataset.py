"""A data set: inputs and labels for training and for the test, and the origin of each example."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maecho.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Dataset:
    """Float32 inputs and int64 labels 0..classes-1, for training and for the test.

    Args:
        groups_train: the origin of every training example (its writer, its domain), as positions in `group_names`. None
            if the origins are not known.
        groups_test: the same for the test.
        mean: the number that the loader subtracted from all channels, or one number for each channel.
        std: the number that it divided by afterwards, in the same form.
        computed_from: a digest of everything that the inputs were computed from. Empty: they were read. Computed inputs
            differ in their last bits from machine to machine, so the digest names their origin instead.
    """

    name: str
    x_train: Float[Tensor, "train ..."] = field(repr=False)
    y_train: Int[Tensor, " train"] = field(repr=False)
    x_test: Float[Tensor, "test ..."] = field(repr=False)
    y_test: Int[Tensor, " test"] = field(repr=False)
    classes: int
    groups_train: Int[Tensor, " train"] | None = field(default=None, repr=False)
    groups_test: Int[Tensor, " test"] | None = field(default=None, repr=False)
    group_names: tuple[str, ...] = field(default=(), repr=False)
    mean: tuple[float, ...] = field(default=(0.0,), repr=False)
    std: tuple[float, ...] = field(default=(1.0,), repr=False)
    computed_from: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            self._check_part(part, x, y)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise InputError(
                f"{self.name}: train and test inputs must have one shape, got {tuple(self.x_train.shape[1:])} and "
                f"{tuple(self.x_test.shape[1:])}"
            )
        if (self.groups_train is None) != (self.groups_test is None):
            raise InputError(f"{self.name}: groups must be given for train and test, got those of one")
        if bool(self.group_names) != (self.groups_train is not None):
            raise InputError(f"{self.name}: groups and group_names must be given together, got one of them")
        for part, groups, y in (("train", self.groups_train, self.y_train), ("test", self.groups_test, self.y_test)):
            if groups is not None:
                self._check_groups(part, groups, y)
        channels = self.x_train.shape[1] if self.x_train.ndim > 1 else 1
        if len(self.mean) != len(self.std) or len(self.mean) not in {1, channels} or min(self.std) <= 0:
            raise InputError(
                f"{self.name}: mean and std must be 1 or {channels} numbers each and std positive, got {self.mean} "
                f"and {self.std}"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything: if a pixel, a label, a group or a name changes, so does the digest. It is computed
        when it is first asked for, and then kept. So tensors must not be changed in place."""
        found = hashlib.sha256(repr((self.name, self.classes, self.group_names, self.mean, self.std)).encode())
        found.update(self.computed_from.encode())
        x_train, x_test = (None, None) if self.computed_from else (self.x_train, self.x_test)
        for tensor in (x_train, self.y_train, x_test, self.y_test, self.groups_train, self.groups_test):
            if tensor is None:
                found.update(b"none")
                continue
            found.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
            found.update(tensor.detach().cpu().contiguous().numpy().data)
        return found.hexdigest()

    def pixels(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Undo the standardisation. The result is inputs in [0, 1], as the loader found them."""
        shape = (1, -1, *[1] * (x.ndim - 2))
        mean, std = (torch.tensor(each, dtype=x.dtype, device=x.device).view(shape) for each in (self.mean, self.std))
        return (x * std + mean).clamp_(0, 1)

    def _check_part(self, part: str, x: Tensor, y: Tensor) -> None:
        if x.dtype != torch.float32 or y.dtype != torch.int64:
            raise InputError(
                f"{self.name}: {part} inputs must be float32 and labels int64, got {x.dtype} and {y.dtype}"
            )
        if y.ndim != 1 or len(x) != len(y) or not len(y):
            raise InputError(
                f"{self.name}: {part} needs one label an input, got inputs {tuple(x.shape)} and labels {tuple(y.shape)}"
            )
        if y.min() < 0 or y.max() >= self.classes:
            raise InputError(
                f"{self.name}: {part} labels must lie in 0..{self.classes - 1}, got {int(y.min())}..{int(y.max())}"
            )

    def _check_groups(self, part: str, groups: Tensor, y: Tensor) -> None:
        if groups.dtype != torch.int64 or groups.shape != y.shape:
            raise InputError(
                f"{self.name}: {part} groups must be int64 {tuple(y.shape)}, got {groups.dtype} {tuple(groups.shape)}"
            )
        if groups.min() < 0 or groups.max() >= len(self.group_names):
            raise InputError(
                f"{self.name}: {part} groups must lie in 0..{len(self.group_names) - 1}, got "
                f"{int(groups.min())}..{int(groups.max())}"
            )
