"""Fixtures that many tests share; what is no fixture stands in `support`."""

from __future__ import annotations

import pytest
from torch import Tensor

from support.clients import ZOO


@pytest.fixture(params=list(ZOO))
def gram(request: pytest.FixtureRequest) -> Tensor:
    """Symmetric PSD matrices of every sort, [1, d, d] in float64."""
    return ZOO[request.param].unsqueeze(0)
