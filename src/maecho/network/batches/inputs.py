"""The inputs of a batch, in one form: a tensor, a dict by argument name, or a tuple of several arguments.

A model is called with one tensor, with keywords, or with several arguments, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maecho.errors import InputError, text_of

NOT_FINITE = "the inputs must be finite, got NaN or infinity"


def converted(x: Any, dtype: torch.dtype | None, label: str) -> Any:
    """Inputs in that form. Arrays and lists of numbers become tensors; their real numbers get the model's dtype.

    Tensors stay what they are.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        return {key: converted(v, dtype, label) if _holds_numbers(v) else v for key, v in x.items()}
    if isinstance(x, tuple | list) and not all_numbers(x):
        return tuple(converted(part, dtype, label) for part in x)
    if not _holds_numbers(x):
        raise InputError(
            f"{label}: inputs must be tensors, arrays or lists of numbers, got {type(x).__name__}; say with inputs= "
            "how they follow from a batch"
        )
    try:
        found = tensor(x)
    except (TypeError, ValueError) as error:
        raise InputError(f"{label}: inputs must be numbers, as many for each example, got: {text_of(error)}") from error
    return found.to(dtype) if dtype is not None and found.is_floating_point() else found


def tensor(x: Any) -> Tensor:
    """An array or a list of numbers as a tensor of its own. Raises TypeError or ValueError if it is neither."""
    return torch.from_numpy(np.array(x, order="C")) if isinstance(x, np.ndarray | np.generic) else torch.tensor(x)


def all_numbers(x: Any) -> bool:
    """Whether this is a list of numbers, or of lists of them."""
    return isinstance(x, tuple | list) and bool(x) and all(is_number(part) or all_numbers(part) for part in x)


def is_number(x: Any) -> bool:
    """Whether this is a single number."""
    return isinstance(x, bool | int | float | np.generic) or (isinstance(x, Tensor | np.ndarray) and x.ndim == 0)


def _holds_numbers(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray) or all_numbers(x)


def examples(x: Any) -> int:
    """How many examples the inputs of a batch hold: the length of their first tensor."""
    first = next((leaf for leaf in leaves(x) if leaf.dim()), None)
    if first is None:
        raise InputError(
            f"inputs must hold a tensor with one row for each example, got {type(x).__name__}; for a data set, use a "
            "DataLoader with a batch_size"
        )
    return len(first)


def leaves(x: Any) -> list[Tensor]:
    """All tensors of the inputs."""
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple) else ()
    return [leaf for part in parts for leaf in leaves(part)]


def each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The inputs with every tensor changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {key: each(value, change) for key, value in x.items()}
    return tuple(each(part, change) for part in x) if isinstance(x, tuple) else x


def per_example(x: Any, n: int) -> bool:
    """Whether this is a tensor with one row for each of n examples. A mask of places, say, is not."""
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == n


def subset(x: Any, which: slice | Tensor, n: int) -> Any:
    """Some examples of a batch of n. What does not have one row for each example stays whole."""

    def rows(t: Tensor) -> Tensor:
        return t[which.to(t.device) if isinstance(which, Tensor) else which] if per_example(t, n) else t

    return each(x, rows)


def own(x: Any, device: torch.device | None = None) -> Any:
    """A copy, on the device if there is one. A model may write into its inputs, and others need them as they were."""
    return each(x, lambda t: t.to(device or t.device, copy=True))


def arguments(x: Any, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, by position and by name, with which a model is called for one batch of inputs. They are a copy."""
    given = own(x, device)
    if isinstance(given, Mapping):
        return [], dict(given)
    return (list(given) if isinstance(given, tuple) else [given]), {}


def few(x: Any, most: int = 4) -> Any:
    """The inputs of the first few examples, in memory of their own. They come whole if examples cannot be told apart,
    as those of a graph."""
    parts = [leaf for leaf in leaves(x) if leaf.dim()]
    n = len(parts[0]) if parts else 0
    apart = all(per_example(leaf, n) and leaf.layout is torch.strided for leaf in parts)
    return own(subset(x, slice(most), n) if apart else x)


def stand_in(x: Any) -> Any:
    """Inputs of the same shapes that say nothing about the data: normal numbers, and otherwise zeros."""
    generator = torch.Generator().manual_seed(0)

    def drawn(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() else torch.zeros_like(t)

    return each(x, drawn)


def shapes(x: Any) -> str:
    """The shapes of the inputs, for errors."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape))
    if isinstance(x, Mapping):
        return ", ".join(f"{key}: {shapes(value)}" for key, value in x.items())
    return ", ".join(map(shapes, x)) if isinstance(x, tuple) else type(x).__name__
