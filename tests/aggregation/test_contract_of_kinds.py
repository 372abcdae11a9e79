"""What every row of METHODS owes its users, on layers whose weights are stored or multiplied in an unusual way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import maecho
from maecho.aggregation.method import Method
from support.clients import batches
from support.contract import EVERY, close
from support.unusual import LAYERS, unusual, unusual_clients

NAMES = sorted(EVERY.keys() - {"pfnm", "pfnm mean"})  # pfnm is for fully connected networks
ROWS = sorted(maecho.METHODS.keys() - {"pfnm"})


def method(name: str) -> Method:
    found = EVERY[name]
    return replace(found, model=unusual(9)) if getattr(found, "model", None) is not None else found  # type: ignore[type-var]


def outputs(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a network with these weights gives out. A fit may write a layer and its BatchNorm in another way."""
    model = unusual().double()
    model.load_state_dict(state)
    with torch.no_grad():
        return torch.as_tensor(model(batches()[0][0].double()))


def same_model(name: str, merged: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    if name.startswith("echo-chain") or name == "dense":
        torch.testing.assert_close(outputs(merged), outputs(own), rtol=1e-3, atol=1e-3)
    else:
        kept = [key for key in own if not (name == "afl" and key.startswith("head."))]
        close({key: merged[key] for key in kept}, {key: own[key] for key in kept}, 1e-4)


@pytest.fixture(scope="module")
def uploads() -> list[maecho.Upload]:
    return unusual_clients()


@pytest.fixture(scope="module")
def same() -> list[maecho.Upload]:
    return unusual_clients(same=True)


@pytest.fixture(scope="module")
def fine() -> list[maecho.Upload]:
    return unusual_clients(dtype=torch.float64)


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=str)
def coarse(request: pytest.FixtureRequest) -> list[maecho.Upload]:
    return unusual_clients(2, request.param)


def test_every_layer_is_read(uploads: list[maecho.Upload]) -> None:
    for upload in uploads:
        assert {layer.name for layer in upload.layers} == set(LAYERS)
        assert upload.recipe["unknown"] == []


@pytest.mark.parametrize("name", NAMES)
def test_one_client_gives_that_client_back(name: str, uploads: list[maecho.Upload]) -> None:
    merged = maecho.aggregate(uploads[:1], method(name))
    same_model(name, merged, uploads[0].state_dict())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"echo-chain", "dense"}))
def test_identical_models_are_a_fixed_point(name: str, same: list[maecho.Upload]) -> None:
    merged = maecho.aggregate(same, method(name))
    same_model(name, merged, same[0].state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_order_of_clients_does_not_matter(name: str, fine: list[maecho.Upload]) -> None:
    close(maecho.aggregate(fine, method(name)), maecho.aggregate(fine[::-1], method(name)), 1e-5)


@pytest.mark.parametrize("name", ROWS)
def test_inputs_are_not_changed_and_files_give_the_same(
    name: str, uploads: list[maecho.Upload], tmp_path: Path
) -> None:
    before = [{k: t.clone() for k, t in upload.tensors().items()} for upload in uploads]
    for upload in uploads:
        upload.save(tmp_path / upload.client)
    merged = maecho.aggregate(uploads, method(name))
    close(maecho.aggregate([tmp_path / upload.client for upload in uploads], method(name)), merged, 0)
    for tensor in merged.values():
        tensor.zero_()
    for upload, old in zip(uploads, before, strict=True):
        for key, tensor in upload.tensors().items():
            assert torch.equal(tensor, old[key]), key


@pytest.mark.parametrize("name", ROWS)
def test_dtype_is_kept(name: str, coarse: list[maecho.Upload]) -> None:
    merged = maecho.aggregate(coarse, method(name))
    assert {t.dtype for t in merged.values() if t.is_floating_point()} == {coarse[0].weights["up.weight"].dtype}
    assert all(t.isfinite().all() for t in merged.values())


def test_a_relay_of_one_client_alone_gives_it_back() -> None:
    merged = maecho.relay(unusual(9), [(unusual(1), batches(1, 8))])
    model = unusual(2)
    model.load_state_dict(dict(merged))
    x = batches(1)[0][0]
    with torch.no_grad():
        torch.testing.assert_close(model(x), unusual(1)(x), rtol=1e-4, atol=1e-4)


def test_a_relay_of_twins_gives_them_back() -> None:
    merged = maecho.relay(unusual(9), [(unusual(1), batches(k, 8)) for k in range(2)])
    model = unusual(2)
    model.load_state_dict(dict(merged))
    x = batches(1)[0][0]
    with torch.no_grad():
        torch.testing.assert_close(model(x), unusual(1)(x), rtol=1e-3, atol=1e-3)
