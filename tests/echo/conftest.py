"""Fixtures for the tests of the relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from support.relays import (
    ZOO,
)


@pytest.fixture(params=list(ZOO))
def kind(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], Callable[..., list[Any]]]:
    return ZOO[request.param]
