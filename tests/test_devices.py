"""Devices by name, and in which dtype tensors are worked on."""

from __future__ import annotations

import pytest
import torch

from maecho import InputError, devices


def test_work_is_done_in_float32_or_finer() -> None:
    half, single, double = (torch.ones(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    whole = torch.ones(1, dtype=torch.int64)
    assert devices.float32_or_finer([]) == torch.float32
    assert devices.float32_or_finer([half, whole]) == torch.float32
    assert devices.float32_or_finer([double, half, single]) == torch.float64


@pytest.mark.parametrize("name", ["meta", "nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="device must be cpu, or cuda where torch sees a GPU"):
        devices.find(name)
