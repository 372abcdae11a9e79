"""Files are written whole or not at all, with the right permissions, and replace only regular files."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from maecho import Upload, aggregate, disk
from support.tiny import ANN, refused, saved, upload


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(ANN)
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, kind in (("pipe", "a pipe"), ("link", "a link; name the file that"), ("dangling", "a link")):
        with refused("cannot write", name, f"got {kind}"):
            upload("bob").save(tmp_path / name)
    assert Upload.load(tmp_path / ANN).client == "ann"
    assert sorted(p.name for p in tmp_path.iterdir()) == [ANN, "dangling", "link", "pipe"]


def test_uploads_are_private_and_models_follow_the_umask(tmp_path: Path) -> None:
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    old = os.umask(0o027)
    try:
        assert mode(saved(tmp_path)) == 0o600
        upload().save(tmp_path / ANN, mode=0o644)
        assert mode(tmp_path / ANN) == 0o644
        aggregate([upload()]).save(tmp_path / "model")
        assert mode(tmp_path / "model") == 0o640
        os.umask(0o002)
        disk.write_json(tmp_path / "json", [1])
        assert mode(tmp_path / "json") == 0o664
    finally:
        os.umask(old)


def test_parts_of_dead_writers_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    dead, foreign = tmp_path / f".{ANN}.0123abcd.part", tmp_path / ".bob.safetensors.0123abcd.part"
    dead.write_bytes(b"half")
    foreign.write_bytes(b"half")
    during: list[set[str]] = []

    def write(file: Any) -> None:
        disk.write_whole(tmp_path / ANN, lambda other: other.write(b"second"))
        during.append({path.name for path in tmp_path.iterdir()})
        file.write(b"first")

    disk.write_whole(tmp_path / ANN, write)
    (alive,) = during[0] - {ANN, foreign.name}
    assert alive.endswith(".part")
    assert alive != dead.name
    assert (tmp_path / ANN).read_bytes() == b"first"
    assert {path.name for path in tmp_path.iterdir()} == {ANN, foreign.name}


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    texts = [bytes([65 + i]) * 5000 for i in range(8)]
    errors: list[BaseException] = []

    def work(text: bytes) -> None:
        try:
            for _ in range(20):
                disk.write_whole(tmp_path / "file", lambda file: file.write(text))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (tmp_path / "file").read_bytes() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_of_255_bytes_can_be_written(tmp_path: Path) -> None:
    name = "é" * 127
    disk.write_whole(tmp_path / name, lambda file: file.write(b"whole"))
    assert (tmp_path / name).read_bytes() == b"whole"


def test_a_private_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    seen: list[int] = []

    def write(file: Any) -> None:
        (part,) = tmp_path.iterdir()
        seen.append(part.stat().st_mode & 0o777)
        file.write(b"secret")

    old = os.umask(0)
    try:
        disk.write_whole(tmp_path / "file", write, mode=0o640)
    finally:
        os.umask(old)
    assert seen == [0o600]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_the_numbers_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the new name must not stand for an empty file: file, name, folder, in this order."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{os.fstat(descriptor).st_size} B")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    disk.write_whole(tmp_path / "file", lambda file: file.write(b"whole"))
    assert events == ["5 B", "name", "folder"]


def test_nothing_is_left_of_a_writer_that_failed(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        disk.write_whole(tmp_path / "file", write)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
