"""The Upload and its file: round trips, sizes, what `inspect` says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import maecho
from maecho.errors import InputError
from maecho.statistics import STATISTICS
from maecho.upload import inspection, size
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload
from support.clients import batches, clients, network, rng


def total(upload: Upload) -> int:
    return sum(t.numel() * t.element_size() for t in upload.tensors().values())


def assert_same(one: Upload, other: Upload) -> None:
    for part in ("client", "examples", "layers", "head", "aliases", "recipe", "fingerprint", "has"):
        assert getattr(one, part) == getattr(other, part), part
    left, right = one.tensors(), other.tensors()
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.sets(st.sampled_from(list(STATISTICS))),
    st.sampled_from([None, 0, 1, 3, 0.5, "2x", "9 KB"]),
    st.text(min_size=1, max_size=20).filter(lambda s: bool(s.strip()) and s.isprintable()),
)
def test_round_trip(tmp_path: Path, dtype: torch.dtype, wanted: set[str], rank: object, client: str) -> None:
    try:
        upload = make_upload(network(0, dtype), batches(dtype=dtype), client, sorted(wanted), rank)  # type: ignore[arg-type]
    except maecho.UploadError as error:
        assert "must fit into" in str(error)  # noqa: PT017 (9 KB is too little for some)
        return
    upload.save(tmp_path / "a.safetensors")
    assert_same(upload, Upload.load(tmp_path / "a.safetensors"))


def test_only_reads_what_is_asked_for(tmp_path: Path) -> None:
    clients(1)[0].save(tmp_path / "a.safetensors")
    for name in STATISTICS:
        assert Upload.load(tmp_path / "a.safetensors", only=[name]).has == {name}


def test_an_upload_cannot_be_changed() -> None:
    upload = clients(1)[0]
    with pytest.raises(AttributeError):
        upload.client = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        upload.weights["0.weight"] = torch.zeros(1)  # type: ignore[index]


def test_weights_are_copies() -> None:
    model = network()
    upload = make_upload(model, batches(), "a")
    with torch.no_grad():
        model[0].weight.zero_()
    assert upload.weights["0.weight"].abs().sum() > 0


def test_fingerprint_is_of_the_architecture() -> None:
    one, other = clients(2)
    assert one.fingerprint == other.fingerprint
    wider = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 5))
    assert make_upload(wider, batches(), "a").fingerprint != one.fingerprint


def uncut(upload: Upload) -> int:
    """The bytes of all that cannot be cut. A class has its number, count and rank beside its mean."""
    assert upload.statistics.get("moments") is not None
    gaussians = (upload.statistics["moments"], *upload.statistics["features"].values())
    cut = {"gram", "projector", "gradients", "moments", "features"}
    bare = replace(upload, statistics={n: v for n, v in upload.statistics.items() if n not in cut})
    units = sum(tensor.nbytes for key, tensor in upload.tensors().items() if key.endswith("/unit"))
    return total(bare) + units + sum(m.means.numel() * 4 + 3 * 8 * len(m.classes) for m in gaussians)


def test_bytes_are_those_of_the_tensors() -> None:
    upload = make_upload(network(), batches(), "a", STATISTICS, rank="3x")
    assert upload.bytes() == total(upload)
    for only in ((), ("gram",), ("moments", "features")):
        named = [t for key, t in upload.tensors().items() if key.split("/")[0] in ("weights", *only)]
        assert upload.bytes(only) == sum(t.nbytes for t in named)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rank_by_number(rank: int) -> None:
    upload = make_upload(network(), batches(), "a", rank=rank)
    assert all(s.rank <= rank for s in (*upload.statistics["gram"].values(), *upload.statistics["projector"].values()))
    assert upload.statistics.get("moments") is not None
    assert all(c.rank <= rank for c in upload.statistics["moments"].covariances)


def test_rank_by_share_of_energy() -> None:
    full = make_upload(network(), batches(), "a", rank=None)
    cut = make_upload(network(), batches(), "a", rank=0.9)
    for name, spectrum in cut.statistics["gram"].items():
        assert 0.9 <= float(spectrum.values.sum() / full.statistics["gram"][name].values.sum()) < 1


@pytest.mark.parametrize("times", [1.2, 2.0, 3.5])
def test_rank_by_size_fits_and_wastes_little(times: float) -> None:
    full = make_upload(network(), batches(), "a", rank=None)
    fixed = uncut(full)
    upload = make_upload(network(), batches(), "a", rank=f"{times}x")
    assert total(upload) <= times * fixed
    if total(upload) < total(full):
        one_more = max(s.width for s in full.statistics["gram"].values()) * 4 * 9
        assert total(upload) > times * fixed - one_more
    assert total(make_upload(network(), batches(), "a", rank="9 KB")) <= 9000


def test_default_is_within_a_few_times_the_weights() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
    draw = rng()
    data = [(torch.randn(64, 200, generator=draw), torch.randint(0, 10, (64,), generator=draw)) for _ in range(20)]
    upload = make_upload(model, data, "a")
    weights = sum(t.numel() * t.element_size() for t in upload.weights.values())
    assert upload.has == {"gram", "projector", "classes", "moments", "features"}
    assert total(upload) <= 4.6 * weights


def test_gradients_are_cut_and_fisher_and_targets_are_not() -> None:
    full, one = (make_upload(network(), batches(), "a", STATISTICS, rank=rank) for rank in (None, 1))
    assert {s.rank for s in one.statistics["gradients"].values()} == {1}
    for name, F in full.statistics["fisher"].items():
        assert torch.equal(one.statistics["fisher"][name], F)
    assert torch.equal(one.statistics["targets"], full.statistics["targets"])  # type: ignore[arg-type]
    fixed = uncut(full)
    upload = make_upload(network(), batches(), "a", STATISTICS, rank="1.5x")
    assert 1.4 * fixed < total(upload) <= 1.5 * fixed
    assert any(
        0 < s.rank < full.statistics["gradients"][name].rank for name, s in upload.statistics["gradients"].items()
    )


def test_half_precision_is_kept_in_the_weights_alone() -> None:
    upload = make_upload(network(0, torch.bfloat16), batches(dtype=torch.bfloat16), "a")
    assert upload.weights["0.weight"].dtype == torch.bfloat16
    assert upload.statistics["gram"]["0"].basis.dtype == torch.float32  # type: ignore[union-attr]


def test_inspection_lists_every_byte_and_says_what_it_reveals() -> None:
    upload = clients(1)[0]
    entries = inspection.entries(upload)
    assert sum(entry.bytes for entry in entries) == total(upload)
    assert {entry.part for entry in entries} == {"weights", *STATISTICS} == inspection.reveals(upload).keys()
    for part, found in (("gram", upload.statistics["gram"]), ("gradients", upload.statistics["gradients"])):
        ranks = {entry.name: entry.rank for entry in entries if entry.part == part}
        assert ranks["0/basis"] == found["0"].rank


def test_inspection_warns_of_a_class_with_one_example() -> None:
    x = torch.randn(3, 12, generator=rng())
    upload = make_upload(network(), [(x, torch.tensor([0, 1, 1]))], "a")
    words = inspection.warnings(upload)
    assert "class 0 has 1 example: its mean IS that example" in words
    assert any("only 2 examples" in word for word in words)
    assert any("fewer examples (3) than inputs at 0, 2, 4" in word for word in words)
    upload = make_upload(network(), [(x, torch.tensor([0, 1, 1]))], "a", ["targets", "classes"])
    assert inspection.warnings(upload) == ["1 example of class 0: its row of targets IS its features"]


def test_averaged_names_are_those_without_a_matrix() -> None:
    model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    upload = make_upload(model, batches(), "a")
    assert inspection.averaged(upload) == [
        f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]


@pytest.mark.parametrize(
    ("rank", "rule"),
    [
        (None, size.Share(1.0)),
        (64, size.Rank(64)),
        (0.999, size.Share(0.999)),
        ("3x", size.Size(3.0, times=True)),
        (" 1.5 x", size.Size(1.5, times=True)),
        ("5 MB", size.Size(5e6, times=False)),
        ("300 B", size.Size(300, times=False)),
        ("2.5KB", size.Size(2500, times=False)),
    ],
)
def test_what_a_rank_means(rank: Any, rule: Any) -> None:
    assert size.parse(rank) == rule


@pytest.mark.parametrize("rank", ["64", "5", "5 M", "x", "-1x", True, -1, 0.0, 1.5, "1e3x", [1]])
def test_other_ranks_are_refused(rank: Any) -> None:
    with pytest.raises(InputError, match="rank must be a whole number, one for each layer, a share of energy in"):
        size.parse(rank)
