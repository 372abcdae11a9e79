"""Data sets of the hub's layouts, read offline from small parquet files that this test writes."""

from __future__ import annotations

import builtins
import io
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from maecho.errors import InputError
from maecho.lab.data import DATASETS, from_hub
from maecho.lab.data.layouts import LAYOUTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
Write = Callable[[str, Mapping[str, int]], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a data set of a layout: examples are numbered, labels and groups go round."""
    datasets = pytest.importorskip("datasets", reason="needs the extra hub")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("MAECHO_DATA_UNCHECKED", "1")

    def write(name: str, rows: Mapping[str, int], **changes: Any) -> Path:
        layout = LAYOUTS[name]
        features = {layout.image: datasets.Image(), layout.label: datasets.ClassLabel(num_classes=layout.classes)}
        for column, feature in EXTRA.get(name, {}).items():
            features[column] = datasets.ClassLabel(names=feature) if feature else datasets.Value("string")
        for part, count in rows.items():
            table = {
                layout.image: [picture(name, k) for k in range(count)],
                layout.label: [k % min(layout.classes, 12) for k in range(count)],
            }
            if layout.group:
                names = EXTRA[name][layout.group]
                table[layout.group] = [k % 3 if names else f"f{k % 3}_10" for k in range(count)]
            for column in features.keys() - table.keys():
                table[column] = ["0"] * count
            path = tmp_path / name / "data" / f"{part}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            schema = datasets.Features(features).arrow_schema
            parquet.write_table(pyarrow.Table.from_pydict({**table, **changes}, schema=schema), path)
        return tmp_path / name

    return write


EXTRA: dict[str, dict[str, list[str]]] = {
    "cifar100": {"coarse_label": []},
    "femnist": {"writer_id": [], "hsf_id": []},
    "femnist-digits": {"writer_id": [], "hsf_id": []},
    "domainnet": {"domain": ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]},
}
"""More columns of each layout: names of classes, or none for text."""


def picture(name: str, k: int) -> dict[str, Any]:
    """A picture whose grey level is its number; DomainNet's have sizes of their own, and some are grey."""
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    layout = LAYOUTS[name]
    grey = k % 2 == 1 if name == "domainnet" else len(layout.scale.mean) == 1
    size = (40 + k, 60) if name == "domainnet" else (layout.side, layout.side)
    content = io.BytesIO()
    image.new("L" if grey else "RGB", size, k if grey else (k, k, k)).save(content, "png")
    return {"bytes": content.getvalue(), "path": None}


def numbers(data: Any, x: torch.Tensor) -> list[int]:
    """Which examples these are."""
    return (255 * data.pixels(x)[:, 0, 0, 0]).round().int().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "channels"), [("mnist", 1), ("cifar10", 3), ("cifar100", 3)])
def test_data_sets_with_a_test_split(write: Write, name: str, channels: int) -> None:
    data = from_hub(name, write(name, {"train": 30, "test": 12}))
    assert data.name == f"hub:{name}"
    side, classes = LAYOUTS[name].side, LAYOUTS[name].classes
    assert (data.x_train.shape, data.x_test.shape) == ((30, channels, side, side), (12, channels, side, side))
    assert numbers(data, data.x_train) == list(range(30))
    assert data.y_train.tolist() == [k % min(classes, 12) for k in range(30)]
    assert data.groups_train is None
    assert data.classes == classes


def test_femnist_has_writers_and_a_tenth_of_each_is_for_the_test(write: Write) -> None:
    data = from_hub("femnist", write("femnist", {"train": 90}))
    assert data.group_names == ("f0_10", "f1_10", "f2_10")
    assert data.classes == 62
    assert data.groups_train is not None
    assert data.groups_test is not None
    assert torch.bincount(data.groups_test).tolist() == [3, 3, 3]
    found = numbers(data, data.x_train) + numbers(data, data.x_test)
    assert sorted(found) == list(range(90))
    assert torch.cat([data.y_train, data.y_test]).tolist() == [k % 12 for k in found]
    assert torch.cat([data.groups_train, data.groups_test]).tolist() == [k % 3 for k in found]


def test_femnist_digits_are_the_first_ten_classes(write: Write) -> None:
    data = from_hub("femnist-digits", write("femnist-digits", {"train": 120}))
    assert data.classes == 10
    found = numbers(data, data.x_train) + numbers(data, data.x_test)
    assert sorted(found) == [k for k in range(120) if k % 12 < 10]
    assert data.name == "hub:femnist-digits"


def test_domainnet_is_resized_and_cut(write: Write) -> None:
    source = write("domainnet", {"train": 40, "test": 20})
    data = from_hub("domainnet", source, side=16, most=2)
    assert data.x_train.shape[1:] == (3, 16, 16)
    assert data.group_names == ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    assert data.groups_train is not None
    # Class and domain repeat after 12 rows, so the first two of each are the first 24.
    assert numbers(data, data.x_train) == list(range(24))
    assert data.groups_train.tolist() == [k % 3 for k in range(24)]
    assert len(from_hub("domainnet", source, side=16, most=0).y_train) == 40
    assert from_hub("domainnet", source, most=1).x_test.shape == (12, 3, 112, 112)


def test_the_digest_of_the_same_files_is_the_same(write: Write) -> None:
    source = write("mnist", {"train": 12, "test": 12})
    assert from_hub("mnist", source).digest == from_hub("mnist", source).digest


def test_bad_sources(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match=r"hub:mnist: cannot load .*nowhere, there is no such data set or no way to it"
    ):
        from_hub("mnist", tmp_path / "nowhere")
    source = write("mnist", {"train": 12})
    with pytest.raises(InputError, match=re.escape(f"hub:mnist: {source} must have the split test, got train")):
        from_hub("mnist", source)
    source = write("cifar10", {"train": 12, "test": 12})
    message = f"hub:cifar100: {source} must have the columns img, fine_label, got img, label"
    with pytest.raises(InputError, match=re.escape(message)):
        from_hub("cifar100", source)
    monkeypatch.delenv("MAECHO_DATA_UNCHECKED")
    message = f"hub:cifar10: train of {source} must have 50000 rows, got 12; MAECHO_DATA_UNCHECKED=1 takes data of"
    with pytest.raises(InputError, match=re.escape(message)):
        from_hub("cifar10", source)


def test_bad_rows(write: Any, tmp_path: Path) -> None:
    source = write("mnist", {"train": 3, "test": 3}, label=[0, 11, 2])
    with pytest.raises(InputError, match=re.escape("hub:mnist: label must be numbers in 0..9, got others")):
        from_hub("mnist", source)
    broken = {"bytes": b"no picture", "path": None}
    source = write("cifar10", {"train": 3, "test": 3}, img=[picture("cifar10", 0), broken, picture("cifar10", 2)])
    with pytest.raises(InputError, match=re.escape("hub:cifar10: row 1 has no readable picture (")):
        from_hub("cifar10", source)


def test_names_and_the_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {f"hub:{name}" for name in LAYOUTS} <= set(DATASETS)
    with pytest.raises(InputError, match=f"from_hub: no layout 'svhn', known are {', '.join(LAYOUTS)}"):
        from_hub("svhn")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    message = "hub:mnist needs Hugging Face datasets, got none; pip install 'maecho[hub]'"
    with pytest.raises(InputError, match=re.escape(message)):
        from_hub("mnist")
