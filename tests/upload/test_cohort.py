"""Uploads that belong together: what all carry, what one lacks, and what is read of a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maecho import Upload, make_upload
from maecho.statistics import STATISTICS
from maecho.upload import header, storage
from maecho.upload.cohort import Cohort
from support.tiny import batches, network, refused, refused_input, saved, upload

VERSION_1 = Path(__file__).parent / "version_1"


def with_only(client: str, *names: str) -> Upload:
    one = upload(client)
    return replace(one, statistics={name: one.statistics[name] for name in names})


def test_it_has_what_every_upload_carries() -> None:
    uploads = [
        with_only("ann", "gram", "classes"),
        with_only("bob", "classes", "projector"),
        with_only("cid", "classes"),
    ]
    assert Cohort(uploads[:1]).has == {"gram", "classes"}
    assert Cohort(uploads).has == {"classes"}
    assert Cohort(uploads).examples == (30, 30, 30)
    with refused("bob: this method needs the statistic 'gram'", "got an upload with classes, projector"):
        Cohort(uploads, needs=["gram"])


def test_of_a_file_only_what_is_needed_or_used_is_read(tmp_path: Path) -> None:
    for client in ("ann", "bob"):
        upload(client).save(tmp_path / client)
    paths = [tmp_path / "ann", tmp_path / "bob"]
    cohort = Cohort(paths, needs=["gram"], uses=["classes"])
    assert cohort.has == set(upload().statistics)
    assert [one.has for one in cohort] == [{"gram", "classes"}] * 2
    assert cohort.upload_bytes == upload().bytes(["gram", "classes"])
    assert [one.client for one in cohort[::-1]] == ["bob", "ann"]


@pytest.mark.parametrize("times", [0, 1])
def test_a_file_that_changes_between_two_readings(tmp_path: Path, times: int) -> None:
    path = saved(tmp_path)
    cohort = Cohort([path, upload("bob")])
    for _ in range(times):
        assert [one.client for one in cohort] == ["ann", "bob"]
    path.unlink()
    replace(upload(), recipe={"other": True}).save(path)
    for read in (lambda: list(cohort), lambda: cohort.parted[0].weights["0.weight"]):
        with refused(f"{path} must stay as it is while it is used, got another file than at the first reading"):
            read()


def test_a_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, seen = saved(tmp_path), header.read, []

    def counted(file: storage.File, known: Any) -> header.Header:
        seen.append(file.path)
        return read(file, known)

    monkeypatch.setattr(header, "read", counted)
    cohort = Cohort([path, upload("bob")], needs=["gram"])
    assert [one.client for one in [*cohort, *cohort]] == ["ann", "bob"] * 2
    assert cohort.parted[0].statistics["gram"]["0"].rank == upload().statistics["gram"]["0"].rank
    assert seen == [path]


def test_a_file_of_format_1_that_changes_between_two_readings(tmp_path: Path) -> None:
    """It has no digests. A change of its header is noticed, and values are checked at every reading."""
    source = VERSION_1 / "upload-cnn-1.safetensors"
    path = tmp_path / "old"
    path.write_bytes(source.read_bytes())
    uploads = Cohort([path])
    content = path.read_bytes()
    path.write_bytes(content.replace(b'\\"client\\": \\"c', b'\\"client\\": \\"d', 1))
    assert path.read_bytes() != content
    with refused("got another file than at the first reading"):
        uploads[0]


def test_names_of_statistics_to_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    everything = ", ".join(STATISTICS)
    with refused_input(f"only must be a list of statistics from {everything}, got the text 'gram'"):
        Upload.load(path, only="gram")
    with refused_input(f"only must name statistics among {everything}, got 'grams'"):
        Upload.load(path, only=["gram", "grams"])
    assert Upload.load(path, only=["gram"]).has == {"gram"}
    make_upload(network(), batches(), "ann", ["gram"]).save(path)
    assert Upload.load(path, only=["gram", "classes"]).has == {"gram"}


def test_uploads_in_memory_are_compared_without_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> str:
        raise AssertionError("nobody asked for a fingerprint")

    monkeypatch.setattr(header, "fingerprint", never)
    assert len(Cohort([upload("ann"), upload("bob")])) == 2


def test_the_order_in_which_layers_are_listed_does_not_matter() -> None:
    bob = upload("bob")
    turned = replace(bob, layers=bob.layers[::-1])
    assert turned.layers != bob.layers
    assert not turned.is_like(upload("ann"))
    assert len(Cohort([upload("ann"), turned])) == 2
