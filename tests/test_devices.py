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


def test_a_model_is_where_its_first_parameter_is() -> None:
    assert devices.of(torch.nn.Linear(2, 1, device="meta")) == torch.device("meta")
    assert devices.of(torch.nn.ReLU()) == torch.device("cpu")


def test_numbers_become_float64_where_they_are() -> None:
    found = devices.double(torch.ones(2, dtype=torch.float16))
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")
    assert devices.double(found) is found, "nothing is copied"
