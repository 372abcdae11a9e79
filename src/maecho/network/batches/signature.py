"""What a model's forward takes."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Signature:
    """The arguments of a forward."""

    least: int
    """How many it must get by position."""
    most: float
    """How many it can get by position."""
    names: frozenset[str] | None
    """The keywords that it takes. None if it takes any."""
    first: str | None = None
    """The name of the first argument by position."""


ONE_TENSOR = Signature(1, 1, None)
"""What is assumed of a forward that Python cannot look into."""


def signature(model: nn.Module) -> Signature:
    """The signature of a model. One that passes on whatever it gets (an ensemble, DataParallel) has that of the model
    inside."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return ONE_TENSOR
    kinds = {p.kind for p in parameters}
    inner: Any = getattr(model, "inputs_of", getattr(model, "module", None))
    if inspect.Parameter.VAR_POSITIONAL in kinds and isinstance(inner, nn.Module):
        return signature(inner)
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return Signature(
        sum(p.default is p.empty for p in by_position),
        math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(by_position),
        None if inspect.Parameter.VAR_KEYWORD in kinds else by_name,
        by_position[0].name if by_position else None,
    )
