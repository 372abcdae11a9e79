"""Every method on networks that cast inside, tensors of every type, inference mode, large inputs and NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.statistics import STATISTICS
from support.clients import batches, network
from support.contract import close
from support.tiny import QUICK

METHODS = sorted(set(maecho.METHODS) - {"dense"})
Data = Callable[[int], list[tuple[Any, Any]]]


class Casting(nn.Module):
    """Its body works in 16 bits, its norm and its head in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.one, self.norm = nn.Linear(12, 9).to(dtype), nn.LayerNorm(9)
        self.two, self.head = nn.Linear(9, 7).to(dtype), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.one(x.to(self.dtype))).float())
        return self.head(torch.relu(self.two(h.to(self.dtype))).float())


class Buffers(nn.Module):
    """Buffers and parameters of every type, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.one, self.norm, self.head = nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)
        self.one.weight.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("phase", torch.randn(9, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(9, dtype=torch.bool))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("hidden", torch.randn(9), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.where(self.mask, torch.relu(self.norm(self.one(x))), 0)
        return self.head(h * (self.phase * self.scale).imag + 0 * self.hidden)


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def outputs(model: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    model.load_state_dict(state)
    with torch.no_grad():
        return torch.as_tensor(model.eval()(x)).double()


def options(method: str, skeleton: nn.Module) -> dict[str, Any]:
    found = dict(QUICK.get(method, {})) | ({"draws": 200} if method == "echo-chain" else {})
    return found | ({"model": skeleton} if method in ("echo-chain", "dense") else {})


def check(make: Callable[[], nn.Module], data: Data, method: str, tolerance: float = 1e-4) -> None:
    """One client comes back; of two, every weight is finite and of its own dtype."""
    models = [made(make, seed) for seed in range(2)]
    if method == "relay":
        results = [
            maecho.relay(made(make, 5), [(models[k], data(k)) for k in range(count)]) for count in (1, 2)
        ]  # fmt: skip
    else:
        uploads = [maecho.make_upload(model, data(k), f"{k}", STATISTICS, rank=None) for k, model in enumerate(models)]
        settings = options(method, made(make, 5)) | ({"backbone": "average"} if method == "afl" else {})
        results = [maecho.aggregate(uploads[:count], method, **settings) for count in (1, 2)]
    x = torch.as_tensor(data(0)[0][0])
    own = models[0].state_dict()
    for name, tensor in results[1].items():
        assert tensor.dtype == own[name].dtype
        assert bool(tensor.isfinite().all())
        assert not tensor.is_inference()
    if method != "afl":
        expected = outputs(made(make, 5), own, x)
        got = outputs(made(make, 5), results[0], x)
        assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("method", [*METHODS, "relay"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_networks_that_cast_inside(method: str, dtype: torch.dtype) -> None:
    check(lambda: Casting(dtype), batches, method, tolerance=torch.finfo(dtype).eps)


def test_dense_refuses_a_network_that_cannot_be_trained_in_float32() -> None:
    uploads = [maecho.make_upload(made(lambda: Casting(torch.bfloat16), 0), batches(), "a", STATISTICS)]
    with pytest.raises(
        maecho.InputError, match=r"dense: the model must take float32 inputs .* must have the same dtype"
    ):
        maecho.aggregate(uploads, "dense", model=made(lambda: Casting(torch.bfloat16), 1), **QUICK["dense"])


@pytest.mark.parametrize("method", [*METHODS, "relay"])
def test_tensors_of_every_type(method: str) -> None:
    check(Buffers, batches, method)


def test_complex_parameters_are_averaged() -> None:
    models = [made(Buffers, seed) for seed in range(2)]
    data = [batches(k) for k in range(2)]
    average = (models[0].scale.detach() + models[1].scale.detach()) / 2
    uploads = [maecho.make_upload(model, data[k], f"{k}", STATISTICS) for k, model in enumerate(models)]
    for method in ("fedavg", "regmean", "ma-echo"):
        merged = maecho.aggregate(uploads, method, **options(method, made(Buffers, 5)))
        torch.testing.assert_close(merged["scale"], average)
    torch.testing.assert_close(maecho.relay(made(Buffers, 5), list(zip(models, data, strict=True)))["scale"], average)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("method", [*METHODS, "dense", "relay"])
def test_inside_inference_mode_all_is_as_outside(method: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    def work() -> maecho.Merged:
        models = [network(k) for k in range(2)]
        if method == "relay":
            return maecho.relay(network(5), [(model, batches(k)) for k, model in enumerate(models)])
        uploads = [maecho.make_upload(model, batches(k), f"{k}", STATISTICS) for k, model in enumerate(models)]
        settings = options(method, network(5)) | ({"backbone": "average"} if method == "afl" else {})
        return maecho.aggregate(uploads, method, **settings)

    outside = work()
    with mode():
        inside = work()
    assert not any(tensor.is_inference() for tensor in inside.values())
    close(inside, outside, 0)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize("rank", [None, "4x"])
@pytest.mark.parametrize("method", [*METHODS, "dense", "relay"])
def test_inputs_of_any_size(method: str, rank: str | None, scale: float) -> None:
    """Their squares are outside of the range of float32."""
    data = [[(x * scale, y) for x, y in batches(k)] for k in range(2)]
    if method == "relay":
        merged = maecho.relay(network(5), list(zip([network(0), network(1)], data, strict=True)))
    else:
        uploads = [maecho.make_upload(network(k), own, f"{k}", STATISTICS, rank=rank) for k, own in enumerate(data)]
        settings = options(method, network(5)) | ({"backbone": "average"} if method == "afl" else {})
        merged = maecho.aggregate(uploads, method, **settings)
    assert all(bool(tensor.isfinite().all()) for tensor in merged.values())


@pytest.mark.parametrize("method", ["fedavg", "regmean", "ma-echo", "fisher", "echo-chain", "relay"])
def test_arrays_of_numpy_are_tensors(method: str) -> None:
    def arrays(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(x.numpy(), y.numpy()) for x, y in batches(seed)]

    def merged(data: Data) -> maecho.Merged:
        if method == "relay":
            return maecho.relay(network(5), [(network(k), data(k)) for k in range(2)])
        uploads = [maecho.make_upload(network(k), data(k), f"{k}", STATISTICS) for k in range(2)]
        return maecho.aggregate(uploads, method, **options(method, network(5)))

    close(merged(arrays), merged(batches), 0)
