"""Uploads that belong together: what all carry, what one lacks, and what is read of a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from maecho import Upload
from maecho.upload.cohort import Cohort
from support.tiny import refused, upload


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
