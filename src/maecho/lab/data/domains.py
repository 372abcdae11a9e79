"""PACS: the same seven classes in four domains (art painting, cartoon, photo, sketch), read with pillow."""

from __future__ import annotations

import hashlib
import io
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import torch

from maecho.errors import InputError
from maecho.lab.data.dataset import Dataset
from maecho.lab.data.known import check_shape, check_sum
from maecho.lab.data.places import find
from maecho.lab.data.scaling import IMAGENET
from maecho.lab.data.splits import drawn

if TYPE_CHECKING:
    from pathlib import Path

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
SIDE = 112
SEED = "maecho-pacs-1"
"""Decides the test examples."""
TEST_SHARE = 0.2
_SOURCE = "the PACS data set (Li et al., 2017), as folders <domain>/<class> of pictures"
_PICTURES = {".jpg", ".jpeg", ".png"}


def pacs(folder: Path | None = None) -> Dataset:
    """PACS from PACS/<domain>/<class>/*.jpg in `folder`/pacs or `folder`, the domains as groups.

    Of every class of every domain a fifth is for the test, by `SEED`. Pictures of another size are resized to 112x112.
    """
    root = find("pacs", folder, "PACS", _SOURCE)
    pixels, labels, groups, tests = [], [], [], []
    for g, domain in enumerate(DOMAINS):
        found = _read(root, domain)
        for y, kind in enumerate(CLASSES):
            files = [file for file in found if file.parent.name == kind]
            pixels += [_decode(file, found[file]) for file in files]
            labels += [y] * len(files)
            groups += [g] * len(files)
            tests += drawn([f"{domain}/{kind}/{file.name}" for file in files], TEST_SHARE, SEED)
    x, test = np.stack(pixels), np.array(tests)
    y_all, g_all = torch.tensor(labels), torch.tensor(groups)
    rows = [torch.from_numpy(np.flatnonzero(test == part)) for part in (False, True)]
    x_train, x_test = (IMAGENET.standardised(x[part.numpy()]) for part in rows)
    return Dataset(
        "pacs",
        x_train,
        y_all[rows[0]],
        x_test,
        y_all[rows[1]],
        classes=len(CLASSES),
        groups_train=g_all[rows[0]],
        groups_test=g_all[rows[1]],
        group_names=DOMAINS,
        mean=IMAGENET.mean,
        std=IMAGENET.std,
    )


def _read(root: Path, domain: str) -> dict[Path, bytes]:
    """All pictures of a domain, checked, in the order of classes and names."""
    found: dict[Path, bytes] = {}
    seen = hashlib.sha256()
    for kind in CLASSES:
        place = root / domain / kind
        if not place.is_dir():
            raise InputError(f"{root}: PACS must have the folder {domain}/{kind}, got none")
        files = sorted(file for file in place.iterdir() if file.suffix.lower() in _PICTURES)
        if not int(TEST_SHARE * len(files)):
            raise InputError(f"{place}: must have {ceil(1 / TEST_SHARE)} pictures or more, got {len(files)}")
        for file in files:
            found[file] = file.read_bytes()
            seen.update(f"{kind}/{file.name}\n{len(found[file])}\n".encode())
            seen.update(found[file])
    check_shape("pacs", domain, root / domain, (len(found),))
    check_sum("pacs", domain, root / domain, seen.hexdigest())
    return found


def _decode(path: Path, content: bytes) -> np.ndarray:
    """RGB, uint8 [112, 112, 3]."""
    try:
        from PIL import Image  # the only place that needs it
    except ImportError as error:
        raise InputError("pacs: pictures need pillow, got none; pip install 'maecho[images]'") from error
    try:
        with Image.open(io.BytesIO(content)) as picture:
            whole = picture.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"{path}: not a whole picture ({error})") from error
    if whole.size != (SIDE, SIDE):
        whole = whole.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(whole)
