"""PACS: domains as groups, a fixed split, and pictures that are missing or damaged."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from maecho.errors import InputError
from maecho.lab.data import load, pacs
from maecho.lab.data.domains import CLASSES, DOMAINS
from maecho.lab.data.known import KNOWN, Known

image = pytest.importorskip("PIL.Image", reason="needs pillow")


def colour(domain: str, kind: str, k: int) -> tuple[int, int, int]:
    return 60 * DOMAINS.index(domain), 30 * CLASSES.index(kind), 10 * k


def write(folder: Path, side: int = 112, count: int = 5, suffix: str = ".png") -> Path:
    """Pictures of one colour each, which says where they stand."""
    for domain in DOMAINS:
        for kind in CLASSES:
            place = folder / "PACS" / domain / kind
            place.mkdir(parents=True)
            for k in range(count):
                image.new("RGB", (side, side), colour(domain, kind, k)).save(place / f"pic_{k}{suffix}")
    return folder / "PACS"


@pytest.mark.usefixtures("own_files")
def test_domains_are_groups_and_a_fifth_is_for_the_test(tmp_path: Path) -> None:
    write(tmp_path)
    data = pacs(tmp_path)
    assert data.group_names == DOMAINS
    assert data.groups_train is not None
    assert data.groups_test is not None
    assert data.x_train.shape == (4 * 7 * 4, 3, 112, 112)
    assert data.x_test.shape == (4 * 7, 3, 112, 112)
    for x, y, groups in ((data.x_train, data.y_train, data.groups_train), (data.x_test, data.y_test, data.groups_test)):
        red, green, _ = (255 * data.pixels(x)[:, :, 50, 50]).round().T
        assert torch.equal(red, 60.0 * groups)
        assert torch.equal(green, 30.0 * y)
    assert set(zip(data.groups_test.tolist(), data.y_test.tolist(), strict=True)) == {
        (g, y) for g in range(4) for y in range(7)
    }
    assert data.digest == pacs(tmp_path).digest


@pytest.mark.usefixtures("own_files")
def test_pictures_of_another_size_are_resized(tmp_path: Path) -> None:
    write(tmp_path / "pacs", side=227, count=5, suffix=".jpg")
    data = pacs(tmp_path)
    assert data.x_train.shape[1:] == (3, 112, 112)


@pytest.mark.usefixtures("own_files")
def test_damaged_pictures(tmp_path: Path) -> None:
    path = write(tmp_path) / "photo" / "dog" / "pic_3.png"
    noise = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image.fromarray(noise).save(buffer, "png")
    for content in (buffer.getvalue()[:2000], b"no picture", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match=re.escape(f"{path}: not a whole picture (")):
            pacs(tmp_path)


@pytest.mark.usefixtures("known_files_only")
def test_missing_or_other_pictures(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"pacs: .* has no PACS, .*; get it from the PACS data set"):
        pacs(tmp_path)
    root = write(tmp_path, side=8)
    with pytest.raises(InputError, match=re.escape("art_painting of pacs must have shape (2048,), got (35,); MAECHO_")):
        pacs(tmp_path)
    (root / "sketch" / "house" / "pic_0.png").unlink()
    message = f"{root / 'sketch' / 'house'}: must have 5 pictures or more, got 4"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAECHO_DATA_UNCHECKED", "1")
        with pytest.raises(InputError, match=re.escape(message)):
            pacs(tmp_path)
        (root / "sketch" / "house").rename(root / "sketch" / "home")
        with pytest.raises(InputError, match=re.escape(f"{root}: PACS must have the folder sketch/house, got none")):
            pacs(tmp_path)


@pytest.mark.usefixtures("known_files_only")
def test_one_picture_in_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path)
    for domain in DOMAINS:
        monkeypatch.setitem(KNOWN["pacs"], domain, Known((35,), checksum(root, domain)))
    pacs(tmp_path)
    first, second = (root / "photo" / kind / "pic_0.png" for kind in ("dog", "house"))
    first.write_bytes(second.read_bytes())
    message = f"{root / 'photo'}: photo of pacs must have the SHA-256 {KNOWN['pacs']['photo'].sha256[:16]}…, got "
    with pytest.raises(InputError, match=re.escape(message)):
        pacs(tmp_path)


def checksum(root: Path, domain: str) -> str:
    """As docs/data.md says it."""
    whole = b""
    for kind in CLASSES:
        for file in sorted((root / domain / kind).iterdir()):
            content = file.read_bytes()
            whole += f"{kind}/{file.name}\n{len(content)}\n".encode() + content
    return hashlib.sha256(whole).hexdigest()


@pytest.mark.data
def test_the_real_pacs() -> None:
    try:
        data = load("pacs")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert data.groups_train is not None
    assert data.groups_test is not None
    assert torch.bincount(data.groups_train).tolist() == [1641, 1878, 1339, 3145]
    assert torch.bincount(data.groups_test).tolist() == [407, 466, 331, 784]
    assert torch.bincount(data.y_test).tolist() == [343, 330, 312, 221, 306, 188, 288]
