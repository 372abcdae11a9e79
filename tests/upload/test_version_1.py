"""Files of format 1 load to the same numbers and merge to the same models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from maecho import Merged, Upload, aggregate
from maecho.linalg.symmetric import Dense
from maecho.upload import envelope, storage
from support import damage
from support.tiny import ANN, refused, same, saved

FIXTURES = Path(__file__).resolve().parent / "version_1"
UPLOADS = sorted(FIXTURES.glob("upload-*.safetensors"))


@pytest.mark.parametrize("path", UPLOADS, ids=lambda path: path.stem)
def test_files_of_format_1_hold_the_same_numbers(path: Path, tmp_path: Path) -> None:
    """Files of format 1 give the numbers that another tool reads, also after they were written in format 2."""
    expected = load_file(path)
    one = Upload.load(path)
    assert same(one.tensors(), expected)
    again = Upload.load(saved(tmp_path, one))
    assert same(again.tensors(), expected)
    assert same(load_file(tmp_path / ANN), expected)
    for part in ("client", "examples", "layers", "head", "aliases", "spaces", "recipe", "fingerprint", "has"):
        assert getattr(one, part) == getattr(again, part), part


def cnn() -> nn.Sequential:
    """The network of the two uploads of format 1."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip


MERGES: dict[str, dict[str, Any]] = {
    "regmean": {}, "fisher": {}, "kronecker": {}, "ma-echo": {"steps": 20}, "echo-chain": {"draws": 200},
}  # fmt: skip


@pytest.mark.parametrize("method", MERGES)
def test_files_of_format_1_are_merged_into_the_same_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The ridge of that time was a share of the mean over all inputs, with the constant of a bias among them.
    mean_of_all = property(lambda total: total.matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None])
    monkeypatch.setattr(Dense, "mean_eigenvalue", mean_of_all)
    merged = aggregate(sorted(FIXTURES.glob("upload-cnn-*")), method, model=cnn(), **MERGES[method])
    expected = Merged.load(FIXTURES / f"merged-{method}.safetensors")
    assert same(dict(expected), load_file(FIXTURES / f"merged-{method}.safetensors"))
    assert merged.averaged == expected.averaged
    assert merged.keys() == expected.keys()
    head = {name for name in expected if name.startswith("8.")} if method == "echo-chain" else set()
    scale = merged["8.weight"].norm() / expected["8.weight"].norm() if head else 1.0  # that of the clients' outputs
    for name, tensor in expected.items():
        found = merged[name] / scale if name in head else merged[name]
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-6)


def test_a_file_that_says_format_1_carries_no_digest(tmp_path: Path) -> None:
    tensors = load_file(UPLOADS[0])
    about = {**storage.read_about(UPLOADS[0], "upload"), "version": 1}
    with refused("must have no digest, since it is of file format 1", "got one with a digest"):
        Upload.load(damage.forged(tmp_path / ANN, tensors, about))


@pytest.mark.parametrize(
    ("listed", "part"), [({}, "got"), ({"": ["float64", 5]}, "'' must be ['float64', 5]"), (3, "")]
)
def test_a_list_of_tensors_in_format_1_is_held_against_the_file(tmp_path: Path, listed: object, part: str) -> None:
    header, data = damage.split(UPLOADS[0].read_bytes())
    content = json.loads(header)
    about = json.loads(content[envelope.METADATA][storage.KEY])
    content[envelope.METADATA][storage.KEY] = json.dumps({**about, "tensors": listed})
    (tmp_path / ANN).write_bytes(damage.joined(json.dumps(content).encode(), data))
    with refused(ANN, part):
        Upload.load(tmp_path / ANN)
