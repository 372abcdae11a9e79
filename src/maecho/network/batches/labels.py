"""Which labels of a batch are classes, and why others are not."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from maecho.errors import InputError, text_of
from maecho.network.batches.inputs import tensor

NO_LABELS = "the batches carry no whole-number label for every example"
"""The reason if nothing stands where labels would be."""


def classes_of(y: Any, size: int) -> tuple[Tensor | None, str]:
    """One class for each example, or None and the reason.

    Whole numbers are classes, of any dtype, in a tensor, an array or a list, and as a column [n, 1].
    """
    if y is None:
        return None, NO_LABELS
    if not isinstance(y, Tensor | np.ndarray | list | tuple):
        return None, f"the labels are of type {type(y).__name__}, which holds no numbers"
    try:
        found = y if isinstance(y, Tensor) else tensor(y)
    except (TypeError, ValueError) as error:
        return None, f"the labels are no numbers ({text_of(error)})"
    if found.dim() == 0 or len(found) != size:
        return None, f"there are {len(found) if found.dim() else 1} labels for {size} examples"
    if found.numel() != size:
        return None, f"the labels are {tuple(found.shape)}, not one number for each of {size} examples"
    if found.is_complex():
        return None, "the labels are complex numbers"
    found = found.reshape(size)
    if found.is_floating_point() and not bool((found == found.round()).all() and found.isfinite().all()):
        return None, "the labels are not whole numbers, as in regression"
    return found.long(), ""


def complaint(labels: Tensor, classes: int) -> str:
    """What is wrong if a label is the number of no class; empty if all are."""
    low, high = int(labels.min()), int(labels.max())
    if low >= 0 and high < classes:
        return ""
    got = low if low < 0 else high
    return f"labels must lie in 0 … {classes - 1}, since the model has {classes} outputs, got {got}"


def check_labels(labels: Tensor, classes: int, client: str) -> None:
    """Raise InputError unless every label is the number of a class."""
    wrong = complaint(labels, classes)
    if wrong:
        raise InputError(f"{client}: {wrong}")
