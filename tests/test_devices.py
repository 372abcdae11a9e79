"""Devices by name, and in which dtype tensors are worked on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import InputError, devices
from maecho.echo.ledger import PrivacyLedger
from maecho.network import stages, tracing
from maecho.network.layers import read
from maecho.network.packed.twin import compared, twin_of
from maecho.network.spaces import Place, Space, verify
from maecho.privacy import Privacy
from maecho.statistics.passes.gather import gather
from maecho.statistics.statistic import Setting


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


CUDNN, MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul
OWNERS: list[tuple[Any, str]] = (
    [(owner, "fp32_precision") for owner in (CUDNN.conv, CUDNN.rnn, MATMUL)]
    if hasattr(CUDNN, "conv")
    else [(owner, "allow_tf32") for owner in (CUDNN, MATMUL)]
)


def tf32() -> list[bool]:
    """Which switches of TF32 are on."""
    return [getattr(owner, name) in ("tf32", True) for owner, name in OWNERS]


def switch(on: bool) -> None:
    for owner, name in OWNERS:
        setattr(owner, name, on if name == "allow_tf32" else "tf32" if on else "none")


@pytest.fixture
def switched_on() -> Iterator[None]:
    before = [getattr(owner, name) for owner, name in OWNERS]
    switch(True)
    yield
    for (owner, name), value in zip(OWNERS, before, strict=True):
        setattr(owner, name, value)


@pytest.mark.usefixtures("switched_on")
def test_full_precision_is_for_the_inside_alone() -> None:
    with devices.full_precision():
        with devices.full_precision():
            assert not any(tf32())
        assert not any(tf32()), "the outer one still needs it"
    assert all(tf32())


@pytest.mark.usefixtures("switched_on")
def test_full_precision_ends_with_an_error() -> None:
    @devices.full_precision()
    def failing() -> None:
        assert not any(tf32())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert all(tf32())


@pytest.mark.usefixtures("switched_on")
def test_full_precision_ends_with_the_last_of_two_that_overlap() -> None:
    """As those of two threads do."""
    one, other = devices.full_precision(), devices.full_precision()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not any(tf32())
    other.__exit__(None, None, None)
    assert all(tf32())


@pytest.mark.usefixtures("switched_on")
def test_full_precision_leaves_switches_that_are_off() -> None:
    switch(False)
    before = [getattr(owner, name) for owner, name in OWNERS]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with devices.full_precision():
            assert [getattr(owner, name) for owner, name in OWNERS] == before
    assert [getattr(owner, name) for owner, name in OWNERS] == before


def test_full_precision_has_older_switches_in_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 to 2.8 have them."""
    cudnn, matmul = SimpleNamespace(allow_tf32=True), SimpleNamespace(allow_tf32=False)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=matmul))
    with devices.full_precision():
        assert (cudnn.allow_tf32, matmul.allow_tf32) == (False, False)
    assert (cudnn.allow_tf32, matmul.allow_tf32) == (True, False)


class Scaled(nn.Linear):
    """No such layer as its kind."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Watched(nn.Module):
    """A network that notes which switches of TF32 are on when it runs. One module is split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.cell, self.two = nn.Linear(4, 6), nn.RNNCell(6, 5), Scaled(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.extend(tf32())
        out: Tensor = self.two(self.cell(torch.relu(self.one(x))))
        return out


SEEN: list[bool] = []
SPACE = Space("one", 6, (Place("one.weight", 0), Place("one.bias", 0), Place("cell.weight_ih", 1)))
WRONG = Space("one", 6, (Place("one.weight", 0),))


def refuse_space(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(InputError, match="must leave the outputs unchanged"):
        verify(model, [WRONG], x)


def compare(model: nn.Module, x: Tensor) -> None:
    twin = twin_of(model)
    with compared(twin, model.eval()):
        twin.network(x)


TRIALS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "a space": lambda model, x: verify(model, [SPACE], x),
    "a space that does not hold": refuse_space,
    "the stages": stages.plan,
    "the modules of a twin": compare,
    "the first batch of an upload": lambda model, x: gather(Setting("c", model, read(model)), [x], []),
    "examples of a release": lambda model, x: PrivacyLedger(Privacy(1.0, 1.0), "c").check_network(model, [x]),
}


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("trial", TRIALS)
def test_comparisons_up_to_rounding_are_made_in_full_precision(trial: str) -> None:
    SEEN.clear()
    TRIALS[trial](Watched(), torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    assert SEEN
    assert not any(SEEN)
    assert all(tf32())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("switched_on")
def test_spaces_of_convolutions_hold_on_a_gpu() -> None:
    """In TF32 the error grows from layer to layer: an input that is off by a rounding of float32 may round to another
    number of TF32."""
    torch.manual_seed(0)
    layers = [part for k in range(6) for part in (nn.Conv2d(64 if k else 3, 64, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 64, 10)).cuda()
    spaces, reasons = tracing.proven(model, torch.randn(16, 3, 8, 8, device="cuda"))
    assert (len(spaces), reasons) == (6, {})
