"""Every row of METHODS merges files, which it may read part by part, as it merges uploads in memory.

The network has all that one party could forget: biases (whose constant has a unit), matrices that attention packs, an
embedding, whole numbers and complex numbers. Files cannot hold complex numbers, so these are read part by part from
memory.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.aggregation import Fisher, Kronecker, MAEcho, RegMean
from maecho.aggregation.method import Method
from maecho.aggregation.units import common_units
from maecho.linalg.spectra import Spectrum
from maecho.statistics import STATISTICS
from maecho.upload import storage
from maecho.upload.cohort import Cohort
from support.clients import batches
from support.contract import EVERY

ROWS = {name: EVERY[name] for name in sorted(maecho.METHODS)} | {
    "fedavg class-aware": EVERY["fedavg class-aware"],
    "fisher uniform": Fisher(weighting="uniform"),
    "regmean shrunk": RegMean(shrink=0.9),
    "kronecker relative": Kronecker(damping=1e-3),
    "ma-echo exact": MAEcho(form="printed"),
    "ma-echo limit": MAEcho(form="printed", solver="limit"),
}


UNIFORM = {"ot", "fedma", "pfnm", "fisher uniform"}
"""All clients count alike."""


class Mixed(nn.Module):
    """12 numbers in, 5 classes out. They stand at places with numbers, whose embeddings are added."""

    places: Tensor
    phase: Tensor

    def __init__(self, plain: bool, phase: bool) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(3))
        if phase:
            self.register_buffer("phase", torch.polar(torch.ones(4), torch.randn(4)))
        self.plain = plain
        if not plain:
            self.embedding = nn.Embedding(3, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.one, self.two, self.head = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.plain:
            h = x.reshape(-1, 3, 4) + self.embedding(self.places)
            x = self.attention(h, h, h, need_weights=False)[0].flatten(1)
        h = self.two(self.one(x).relu()).relu()
        found: Tensor = self.head(h)
        return found


def mixed(seed: int, plain: bool = False, phase: bool = False) -> Mixed:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Mixed(plain, phase)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_()
        model.places = (model.places + seed) % 3
        return model


@functools.cache
def uploads(plain: bool = False, phase: bool = False) -> tuple[maecho.Upload, ...]:
    rank = None if plain else 3
    models = [mixed(i, plain, phase) for i in range(3)]
    return tuple(
        maecho.make_upload(model, batches(i, 3 + i), f"client-{i}", STATISTICS, rank=rank)
        for i, model in enumerate(models)
    )


def agree(found: maecho.Merged, expected: maecho.Merged) -> None:
    assert found.keys() == expected.keys()
    assert sorted(found.averaged) == sorted(expected.averaged)
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype
        torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-7)


def method_for(name: str, **options: bool) -> Method:
    method = ROWS[name]
    return replace(method, model=mixed(9, **options)) if getattr(method, "model", None) is not None else method  # type: ignore[type-var]


def test_the_network_has_all_of_it() -> None:
    first = uploads(phase=True)[0]
    assert {"attention.in_proj_weight", "attention.in_proj_bias"} <= {one.name for one in first.stored}
    grams = first.statistics["gram"]
    assert any(layer.one_hot for layer in first.layers)
    cut = [G for G in grams.values() if isinstance(G, Spectrum) and G.rest is not None]
    assert any(G.sent_unit is not None for G in cut)
    assert {first.weights["places"].dtype, first.weights["phase"].dtype} == {torch.int64, torch.complex64}


@pytest.mark.parametrize("name", ROWS)
def test_files_merge_as_uploads_do(name: str, tmp_path: Path) -> None:
    plain = name == "pfnm"  # for fully connected networks alone
    given, method = uploads(plain), method_for(name)
    for upload in given:
        upload.save(tmp_path / upload.client)
    expected = maecho.aggregate(given, method)
    assert expected.keys() == mixed(0, plain).state_dict().keys()
    agree(maecho.aggregate([tmp_path / upload.client for upload in given], method), expected)
    if name != "echo-chain":  # it takes the largest number of all clients
        assert torch.equal(expected["places"], given[2].weights["places"])


def test_units_are_found_from_grams_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for upload in uploads():
        upload.save(tmp_path / upload.client)
    files = Cohort([tmp_path / upload.client for upload in uploads()], needs=["gram"])
    asked: list[str] = []
    read = storage.File.read
    monkeypatch.setattr(storage.File, "read", lambda file, name: asked.append(name) or read(file, name))
    found, expected = common_units(files), common_units(uploads())
    assert asked
    assert all(name.startswith("gram/") for name in asked)
    assert {name for name, unit in found.items() if unit is not None} == {
        layer.name for layer in uploads()[0].layers if layer.bias is not None
    }
    for name, unit in expected.items():
        assert (unit is None and found[name] is None) or torch.equal(unit, found[name])


def test_uploads_that_are_stored_in_another_way_are_not_alike() -> None:
    one = uploads()[0]
    other = replace(one, client="other", stored=one.stored[:-1])
    assert not one.is_like(other)
    assert one.is_like(replace(one, client="other"))
    with pytest.raises(maecho.UploadError, match=f"stored.* as in {one.client}"):
        Cohort([one, other])


@pytest.mark.parametrize("name", ROWS)
def test_parts_of_uploads_merge_as_the_uploads_do_and_complex_numbers_are_averaged(name: str) -> None:
    given, method = uploads(name == "pfnm", phase=True), method_for(name, phase=True)
    expected = maecho.aggregate(given, method)
    agree(maecho.aggregate(given, method, device="cpu"), expected)
    total = sum(upload.examples for upload in given)
    shares = [1 / 3 if name in UNIFORM else upload.examples / total for upload in given]
    pairs = zip(given, shares, strict=True)
    wanted = torch.stack([p * upload.weights["phase"].to(torch.complex128) for upload, p in pairs]).sum(0)
    # A simulated client's part of the draws is a whole number.
    tolerance = 1e-2 if name == "echo-chain" else 1e-7
    torch.testing.assert_close(expected["phase"], wanted.to(torch.complex64), rtol=tolerance, atol=tolerance)
