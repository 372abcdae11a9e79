"""No method grows faster than linearly in clients and in depth. benchmarks/scaling.py measures more sizes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


def benchmark() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


SCALING = benchmark()
MARGIN = 2.0
"""Four times the size may take twice as long again as four times the time. A square would take 16 times the time."""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["clients", "depth"])
@pytest.mark.parametrize(
    "row", ["fedavg", "regmean", "fisher", "ma-echo", "ma-echo, limit", "echo-chain", "make_upload"]
)
def test_time_grows_no_faster_than_linearly(row: str, what: str) -> None:
    if row == SCALING.CLIENT and what == "clients":
        pytest.skip("a client makes one upload")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    fixed = {"clients": SCALING.CLIENTS, "width": SCALING.WIDTH, "depth": SCALING.DEPTH}
    small, large = (SCALING.measure(row, **{**fixed, what: size}) for size in (4, 16))
    torch.set_num_threads(before)
    assert large <= 4 * MARGIN * small, f"{row}: {small:.3f} s, then {large:.3f} s"


def test_an_exponent_is_that_of_the_upper_half() -> None:
    assert SCALING.exponent((1, 2, 4), (5.0, 1.0, 4.0)) == 2
    assert SCALING.exponent((10, 20, 40, 80), (9.0, 1.0, 2.0, 4.0)) == 1
