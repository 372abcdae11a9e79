"""Fixtures that many tests use. Helpers that are not fixtures are in `support`."""

from __future__ import annotations

import pytest
from torch import Tensor

from support.clients import ZOO


@pytest.fixture(params=list(ZOO))
def gram(request: pytest.FixtureRequest) -> Tensor:
    """Every symmetric PSD matrix of the zoo in turn, [1, d, d] in float64."""
    return ZOO[request.param].unsqueeze(0)
