"""Aggregation on another device gives the same answers. They come back to the device of the uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho import devices
from maecho.aggregation import choose
from maecho.cli import app as cli
from maecho.upload.cohort import Cohort
from support.clients import clients, network, rng
from support.contract import EVERY, Everything, close, everything, skip_tokens
from support.tiny import refused, upload

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

BAD = ["abacus", "", "cuda:99", "meta", pytest.param("cuda", marks=needs_none)]
MESSAGE = "device must be cpu, or cuda where torch sees a GPU, got "


def merge(name: str, uploads: list[maecho.Upload] | list[Path], device: str | None, model: nn.Module) -> maecho.Merged:
    return maecho.aggregate(uploads, EVERY[name], device=device, model=model)


CHAIN = 1e-4
"""What echo-chain may differ by: its solves amplify round-off. Float32's at the inputs moves it by 4e-6 (below)."""


def agree(name: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare results of two devices."""
    close({key: tensor.cpu() for key, tensor in one.items()}, other, CHAIN if "chain" in name else 1e-5)


def places(state: dict[str, Tensor]) -> set[str]:
    return {tensor.device.type for tensor in state.values()}


def saved(uploads: list[maecho.Upload], folder: Path) -> list[Path]:
    paths = [folder / f"{upload.client}.safetensors" for upload in uploads]
    for one, path in zip(uploads, paths, strict=True):
        one.save(path)
    return paths


@pytest.mark.parametrize("make", [clients, everything])
def test_an_upload_moves_whole(make: Callable[..., list[maecho.Upload]]) -> None:
    for one in make(2):
        moved = one.to("cpu")
        assert (moved.client, moved.recipe, moved.fingerprint) == (one.client, one.recipe, one.fingerprint)
        assert (moved.layers, moved.head, moved.spaces) == (one.layers, one.head, one.spaces)
        assert (moved.aliases, moved.has) == (one.aliases, one.has)
        close(moved.tensors(), one.tensors(), 0)


def test_a_moved_upload_can_be_saved(tmp_path: Path) -> None:
    [path] = saved([upload().to("cpu")], tmp_path)
    close(maecho.Upload.load(path).tensors(), upload().tensors(), 0)


@pytest.mark.parametrize("name", EVERY)
def test_the_cpu_by_name_changes_nothing(name: str) -> None:
    uploads = clients(2)
    if torch.cuda.is_available() and "dense" in name:
        pytest.skip("dense takes a GPU where there is one")
    close(merge(name, uploads, "cpu", network()), merge(name, uploads, None, network()), 0)


def shaken(part: Any, by: float, draw: torch.Generator) -> Any:
    """A value of a statistic, or weights, with every number off by a relative error of this size."""
    if isinstance(part, Tensor):
        noise = torch.randn(part.shape, generator=draw, dtype=torch.float64)
        return part * (1 + by * noise).to(part.dtype) if part.is_floating_point() else part
    if isinstance(part, Mapping):
        return {key: shaken(one, by, draw) for key, one in part.items()}
    if isinstance(part, tuple):
        return tuple(shaken(one, by, draw) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: shaken(getattr(part, f.name), by, draw) for f in fields(part)})
    return part


CHAINS = [name for name in EVERY if "chain" in name]


def merge_shaken(name: str, by: float) -> maecho.Merged:
    """Merge uploads whose weights, moments and features are off by so much."""
    uploads, draw = clients(3, torch.float64), rng(1)
    for i, one in enumerate(uploads):
        drawn_from = {kind: shaken(one.statistics[kind], by, draw) for kind in ("moments", "features")}
        weights = shaken(one.weights, by, draw)
        uploads[i] = replace(one, weights=weights, statistics={**one.statistics, **drawn_from})
    return merge(name, uploads, "cpu", network())


@pytest.mark.parametrize("name", CHAINS)
def test_round_off_of_another_device_hardly_moves_echo_chain(name: str) -> None:
    """Numbers rounded as float32 rounds them stand for another device. A result off by a thousandth does not agree."""
    exact = merge(name, clients(3, torch.float64), "cpu", network())
    agree(name, merge_shaken(name, 6e-8), exact)
    with pytest.raises(AssertionError):
        agree(name, {key: 1.001 * tensor for key, tensor in exact.items()}, exact)


def test_tied_weights_stay_tied() -> None:
    merged = maecho.aggregate(everything(2), "fedavg", device="cpu")
    assert merged["one.weight"] is merged["two.weight"]


@pytest.mark.parametrize("device", BAD)
def test_a_device_that_is_not_there(device: str) -> None:
    for act in (
        lambda: devices.find(device),
        lambda: upload().to(device),
        lambda: Cohort([upload()], device=device),
        lambda: maecho.aggregate([upload()], "fedavg", device=device),
    ):
        with refused(f"{MESSAGE}{device!r}", error=ValueError):
            act()
    with refused("device must be ", repr(device), error=ValueError):
        maecho.aggregate(clients(2), EVERY["dense"], device=device)


def test_dense_takes_the_same_device_argument() -> None:
    assert getattr(choose("dense", device="cpu")[1], "device") == "cpu"  # noqa: B009 (a method need not have one)
    assert choose("fedavg", device="cpu") == choose("fedavg")
    merged = maecho.aggregate(clients(2), EVERY["dense"], device="cpu")
    assert "device='cpu'" in merged.recipe["options"]


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["maecho", "aggregate", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_the_command_line_takes_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, paths = tmp_path / "merged", [str(path) for path in saved(clients(2), tmp_path)]
    assert command(monkeypatch, *paths, "--out", str(out), "--device", "cpu") == 0
    close(maecho.Merged.load(out), maecho.aggregate(clients(2)), 0)
    assert command(monkeypatch, *paths, "--out", str(tmp_path / "new"), "--device", "abacus") == 2
    assert f"error: {MESSAGE}'abacus'\n" in capsys.readouterr().err
    twice = ("--method", "dense", "--device", "cpu", "--set", "device=cuda")
    assert command(monkeypatch, *paths, "--out", str(tmp_path / "new"), *twice) == 2
    assert "device must be given once, got --device cpu and --set device=cuda" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@needs_gpu
@pytest.mark.parametrize("make", [clients, everything])
@pytest.mark.parametrize("name", EVERY)
def test_a_gpu_gives_what_the_cpu_gives(name: str, make: Callable[..., list[maecho.Upload]]) -> None:
    if make is everything:
        skip_tokens(name)
    uploads, model = make(3, torch.float64), Everything() if make is everything else network()
    there = [one.to("cuda") for one in uploads]
    assert all(tensor.is_cuda for one in there for tensor in one.tensors().values())
    on_cpu = merge(name, uploads, "cpu", model)
    for given, device, home in ((there, None, "cuda"), (there, "cuda", "cuda"), (uploads, "cuda", "cpu")):
        merged = merge(name, given, device, model)
        assert places(merged) == {home}
        agree(name, merged, on_cpu)


@needs_gpu
@pytest.mark.parametrize("name", EVERY)
def test_files_worked_on_by_a_gpu_come_back_to_the_cpu(name: str, tmp_path: Path) -> None:
    uploads = clients(3, torch.float64)
    merged = merge(name, saved(uploads, tmp_path), "cuda", network())
    assert places(merged) == {"cpu"}
    agree(name, merged, merge(name, uploads, "cpu", network()))
    assert places(merge(name, [one.to("cuda") for one in uploads], "cpu", network())) == {"cuda"}


@needs_gpu
def test_dense_trains_the_same_wherever_its_model_is() -> None:
    uploads, settings = clients(2, torch.float64), {"start": "random", "device": "cuda"}
    states = [
        maecho.aggregate(uploads, EVERY["dense"], model=model, **settings) for model in (network(), network().cuda())
    ]
    close(*states)
