"""A size for the whole upload: what one statistic does not need the others get, whichever comes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maecho import InputError, Upload, make_upload
from maecho.statistics import STATISTICS
from maecho.statistics.parts import MATRICES
from maecho.upload import inspection, size
from support.clients import batches, network

SENT = ["gram", "projector", "classes", "moments", "features", "gradients"]


@pytest.mark.parametrize("small", ["gram", "projector"])
def test_what_one_statistic_does_not_need_goes_to_the_other(small: str) -> None:
    whole = make_upload(network(), batches(count=8), "ann", ["gram", "projector"], rank=None)
    thin = STATISTICS[small].cut(whole.statistics[small], lambda spectrum: 1)
    upload = replace(whole, statistics={**whole.statistics, small: thin})
    (large,) = {"gram", "projector"} - {small}
    room = upload.bytes([small]) + 0.8 * upload.bytes([large]) - 0.8 * upload.bytes([])
    cut = size.cut(upload, size.Size(room, times=False))
    assert cut.bytes() <= room
    assert cut.bytes([small]) == upload.bytes([small])
    # Of a layer's spectrum whole directions are kept, so a little room stays.
    assert cut.bytes() > 0.9 * room


def test_a_rank_for_each_layer() -> None:
    """What is named is cut to its rank, what is not named stays whole, and inputs' moments are of no layer."""
    statistics = ["gram", "projector", "moments"]
    whole = make_upload(network(), batches(count=8), "ann", statistics, rank=None)
    first, *others = whole.statistics["gram"]
    upload = make_upload(network(), batches(count=8), "ann", statistics, rank={first: 2})
    for name in ("gram", "projector"):
        assert upload.statistics[name][first].rank == 2
        for layer in others:
            assert upload.statistics[name][layer].rank == whole.statistics[name][layer].rank
    assert upload.bytes(["moments"]) == whole.bytes(["moments"])
    assert upload.recipe["rank"] == {first: 2}


def test_a_rank_for_each_layer_names_layers() -> None:
    """Before the data are read."""

    def data() -> Iterator[None]:
        raise AssertionError("read the data")
        yield

    with pytest.raises(InputError, match=r"rank must name layers of the network \(.*\), got 'fc9'"):
        make_upload(network(), data(), "ann", rank={"fc9": 2})
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(InputError, match=r"rank of 'fc1' must be a whole number, at least 0, got"):
            size.parse({"fc1": wrong})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"rank must be a whole number, one for each layer, .* got \{\}"):
        size.parse({})


def test_a_cut_gram_says_the_mean_of_what_was_cut_and_a_projector_does_not() -> None:
    whole, cut = (make_upload(network(), batches(count=8), "ann", SENT, rank=rank) for rank in (None, 2))
    for name in ("gram", "gradients"):
        for layer, spectrum in cut.statistics[name].items():
            assert spectrum.rest is not None
            torch.testing.assert_close(spectrum.trace, whole.statistics[name][layer].trace)
    for name, upload in (("projector", cut), ("gram", whole), ("gradients", whole)):
        assert all(spectrum.rest is None for spectrum in upload.statistics[name].values())


def test_a_rest_is_counted_listed_moved_and_kept_in_files(tmp_path: Path) -> None:
    upload = make_upload(network(), batches(count=8), "ann", ["gram"], rank=2)
    rests = {key: tensor for key, tensor in upload.tensors().items() if key.endswith("/rest")}
    assert {key.split("/")[1] for key in rests} == set(upload.statistics["gram"])
    assert upload.bytes() == sum(tensor.nbytes for tensor in upload.tensors().values())
    listed = {f"{e.part}/{e.name}": e.bytes for e in inspection.entries(upload)}
    assert {key: listed[key] for key in rests} == dict.fromkeys(rests, 8)
    upload.save(tmp_path / "ann.safetensors")
    for again in (Upload.load(tmp_path / "ann.safetensors"), upload.to("cpu")):
        for layer, spectrum in upload.statistics["gram"].items():
            assert torch.equal(again.statistics["gram"][layer].rest, spectrum.rest)


def test_a_file_without_rests_is_zero_in_the_directions_that_were_cut(tmp_path: Path) -> None:
    upload = make_upload(network(), batches(count=8), "ann", ["gram"], rank=2)
    old = replace(upload, statistics={"gram": {n: s.held() for n, s in upload.statistics["gram"].items()}})
    old.save(tmp_path / "ann.safetensors")
    again = Upload.load(tmp_path / "ann.safetensors")
    assert not any(key.endswith("/rest") for key in again.tensors())
    for layer, spectrum in again.statistics["gram"].items():
        assert torch.linalg.matrix_rank(spectrum.dense().double(), tol=1e-4).tolist() == [2], layer


@pytest.mark.parametrize("times", [1.0, 1.01, 1.5, 4.0])
def test_no_size_is_exceeded_by_variances_that_were_there_before(times: float) -> None:
    """They were taken for what cannot be cut, and so made room for several times themselves."""
    whole = make_upload(network(), batches(count=8), "ann", SENT, rank=None)
    once = size.cut(whole, size.Rank(3))
    fixed = size.cut(whole, size.Size(1.0, times=True)).bytes()
    cut = size.cut(once, size.Size(times, times=True))
    assert cut.bytes() <= times * fixed
    assert (cut.statistics["moments"].residual is None) == (times < 1.5)


def test_rests_are_kept_before_variances_that_take_more_room() -> None:
    whole = make_upload(network(), batches(count=8), "ann", ["gram", "moments"], rank=None)
    fixed = size.cut(whole, size.Size(1.0, times=True)).bytes()
    cut = size.cut(whole, size.Size(fixed + 8 * len(whole.layers), times=False))
    assert all(s.rest is not None for s in cut.statistics["gram"].values())
    assert cut.statistics["moments"].residual is None


def test_a_rest_beside_no_eigenvectors_is_refused() -> None:
    listed = {"values": torch.ones(1, 3), "rest": torch.ones(1)}
    assert MATRICES.complaint(listed) == "have eigenvectors beside a rest, got none"
    with pytest.raises(ValueError, match="a rest must come with eigenvectors, got none"):
        MATRICES.read(listed, {})
    assert MATRICES.complaint({**listed, "basis": torch.eye(3)[None], "rest": torch.ones(1).int()}) is not None
