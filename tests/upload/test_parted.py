"""Parts of uploads: each is read and checked when it is asked for, and nothing else is."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maecho import Upload, aggregate
from maecho.statistics import STATISTICS
from maecho.upload import storage
from maecho.upload.cohort import Cohort
from maecho.upload.parted import Parted
from support import damage
from support.clients import clients
from support.tiny import QUICK, refused, saved, upload, with_last_entry

SUMMING = ("fedavg", "fisher", "regmean", "afl")


def one_of(path: Path) -> Parted:
    return Cohort([path], needs=STATISTICS).parted[0]


def changed(path: Path, key: str, value: Any) -> None:
    """Write the file again with another tensor, and digests that fit it."""
    about, tensors = storage.read_about(path, "upload"), load_file(path)
    damage.forged(path, {**tensors, key: value(tensors[key])}, about)


def test_they_are_what_the_whole_upload_holds(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for found in (one_of(path), Cohort([upload()], needs=STATISTICS, device="cpu").parted[0]):
        whole = upload()
        assert (found.client, found.examples, found.layers, found.head) == ("ann", 30, whole.layers, whole.head)
        assert dict(found.weights).keys() == found.listed.keys() == whole.weights.keys()
        assert all(torch.equal(found.weights[name], tensor) for name, tensor in whole.weights.items())
        assert found.statistics.keys() == whole.statistics.keys()
        for name, statistic in STATISTICS.items():
            if name == "features":
                continue
            parts, own = found.statistics[name], whole.statistics[name]
            got = statistic.tensors(dict(parts) if statistic.by_name else parts)
            assert all(torch.equal(got[key], tensor) for key, tensor in statistic.tensors(own).items())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("weights/0.weight", with_last_entry, "weight '0.weight' must be finite, got NaN or infinity"),
        ("gram/0/basis", with_last_entry, "gram of '0' must be finite, got NaN or infinity"),
        ("gram/0/basis", lambda U: 2 * U, "gram of '0' must be given by orthonormal eigenvectors, got UᵀU off by"),
        ("gram/0/basis", lambda U: torch.full_like(U, 3e38), "orthonormal eigenvectors, got UᵀU off by inf"),
        ("gram/0/values", lambda s: -s, "gram of '0' must be positive semidefinite, got the eigenvalue"),
        ("projector/0/values", lambda s: s + 2, "projector of '0' must be of eigenvalues in [0, 1], got"),
        ("fisher/0.weight", lambda F: -F - 1, "fisher of '0.weight' must not be negative, got"),
        ("targets", with_last_entry, "targets must be finite, got NaN or infinity"),
        ("classes", lambda n: n + 1, "class counts must sum to its 30 examples, got 33"),
    ],
)
def test_a_part_is_checked_when_it_is_read(tmp_path: Path, key: str, value: Any, words: str) -> None:
    path = saved(tmp_path)
    changed(path, key, value)
    found = one_of(path)  # what was not asked for is not read
    name, _, entry = key.partition("/")
    assert found.weights["2.weight"].isfinite().all()
    assert found.statistics["gram"]["2"].known
    with refused(f"{path}: ann: ", words):
        part = found.weights if name == "weights" else found.statistics[name]
        if entry:
            part[entry.removesuffix("/basis").removesuffix("/values")]
    with refused(words):
        Upload.load(path)


def test_bytes_that_are_not_those_that_were_written(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = one_of(path)
    weight = bytes(upload().weights["0.weight"].numpy().tobytes())
    content = path.read_bytes()
    assert content.count(weight) == 1
    path.write_bytes(content.replace(weight, weight[::-1]))
    assert found.weights["2.weight"].isfinite().all()
    with refused(f"{path} must be as it was written, got other bytes in the tensor 'weights/0.weight'"):
        found.weights["0.weight"]


def test_features_are_read_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="features must be read as a whole"):
        one_of(saved(tmp_path)).statistics["features"]


@pytest.mark.parametrize("method", SUMMING)
def test_methods_that_sum_keep_one_tensor_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """They merge files as they merge uploads, and of a file only two tensors are in memory at a time."""
    uploads = clients(rank=None)
    for one in uploads:
        one.save(tmp_path / one.client)
    expected = aggregate(uploads, method, **QUICK.get(method, {}))
    alive: list[weakref.ref[torch.Tensor]] = []
    read, most = storage.File.read, 0

    def watched(file: storage.File, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(file, name)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in alive))
        return tensor

    monkeypatch.setattr(storage.File, "read", watched)
    monkeypatch.setattr("maecho.upload.cohort.of_file", lambda *arguments: pytest.fail("a whole file was read"))
    found = aggregate([tmp_path / one.client for one in uploads], method, **QUICK.get(method, {}))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert most <= 8  # a matrix and its spectrum of this client and of the last one
