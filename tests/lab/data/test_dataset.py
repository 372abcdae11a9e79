"""A data set is checked when it is made, and its digest tells any two apart."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from maecho.errors import InputError
from maecho.lab.data import DATASETS, Dataset, load


def small(**changes: object) -> Dataset:
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    return Dataset(**{"name": "small", "x_train": x, "y_train": y, "x_test": x, "y_test": y, "classes": 2, **changes})  # type: ignore[arg-type]


def grouped(**changes: object) -> Dataset:
    groups = torch.tensor([0, 1])
    return small(**{"groups_train": groups, "groups_test": groups, "group_names": ("ann", "bob"), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_train": torch.zeros(2, 3, dtype=torch.float64)},
            "small: train inputs must be float32 and labels int64, got torch.float64 and torch.int64",
        ),
        (
            {"y_test": torch.zeros(3, dtype=torch.int64)},
            "small: test needs one label an input, got inputs (2, 3) and labels (3,)",
        ),
        ({"y_train": torch.tensor([0, 2])}, "small: train labels must lie in 0..1, got 0..2"),
        ({"x_test": torch.zeros(2, 4)}, "small: train and test inputs must have one shape, got (3,) and (4,)"),
        ({"groups_test": None}, "small: groups must be given for train and test, got those of one"),
        ({"group_names": ()}, "small: groups and group_names must be given together, got one of them"),
        (
            {"groups_train": torch.tensor([0, 1, 1])},
            "small: train groups must be int64 (2,), got torch.int64 (3,)",
        ),
        (
            {"groups_test": torch.tensor([0.0, 1.0])},
            "small: test groups must be int64 (2,), got torch.float32 (2,)",
        ),
        ({"groups_test": torch.tensor([0, 2])}, "small: test groups must lie in 0..1, got 0..2"),
        (
            {"mean": (0.0, 0.0)},
            "small: mean and std must be 1 or 3 numbers each and std positive, got (0.0, 0.0) and (1.0,)",
        ),
        ({"std": (0.0,)}, "small: mean and std must be 1 or 3 numbers each and std positive, got (0.0,) and (0.0,)"),
    ],
)
def test_a_dataset_is_checked_at_birth(changes: dict[str, object], message: str) -> None:
    assert repr(small()) == repr(grouped()) == "Dataset(name='small', classes=2)"
    with pytest.raises(InputError, match=re.escape(message)):
        grouped(**changes)


def test_the_digest_is_that_of_the_content() -> None:
    assert grouped().digest == grouped().digest
    assert re.fullmatch(r"[0-9a-f]{64}", small().digest)


@pytest.mark.parametrize("field", ["x_train", "y_train", "x_test", "y_test", "groups_train", "groups_test"])
def test_one_value_changed_gives_another_digest(field: str) -> None:
    changed = getattr(grouped(), field).clone()
    changed.view(-1)[1] = torch.nextafter(torch.tensor(0.0), torch.tensor(1.0)) if changed.is_floating_point() else 0
    assert replace(grouped(), **{field: changed}).digest != grouped().digest


@pytest.mark.parametrize(
    "changes",
    [{"name": "other"}, {"classes": 3}, {"group_names": ("ann", "eve")}, {"mean": (0.5,)}, {"std": (2.0,)}],
)
def test_what_the_values_mean_is_part_of_the_digest(changes: dict[str, object]) -> None:
    assert grouped(**changes).digest != grouped().digest


def test_the_shape_is_part_of_the_digest() -> None:
    images = {part: torch.zeros(2, 1, 2, 2) for part in ("x_train", "x_test")}
    flat = {part: torch.zeros(2, 4) for part in ("x_train", "x_test")}
    assert small(**images).digest != small(**flat).digest
    assert small().digest != grouped().digest


def test_the_digest_does_not_depend_on_the_layout_in_memory() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = {"x_train": x, "x_test": x}
    last = {key: value.contiguous(memory_format=torch.channels_last) for key, value in images.items()}
    assert small(**images).digest == small(**last).digest


def test_pixels_undo_the_standardisation() -> None:
    rng = torch.Generator().manual_seed(0)
    raw = torch.rand(5, 3, 4, 4, generator=rng)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.1, 0.3)
    x = (raw - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    y = torch.zeros(5, dtype=torch.int64)
    dataset = small(x_train=x, y_train=y, x_test=x, y_test=y, mean=mean, std=std)
    torch.testing.assert_close(dataset.pixels(x), raw)
    assert torch.equal(small().pixels(torch.tensor([[2.0, -1.0, 0.5]])), torch.tensor([[1.0, 0.0, 0.5]]))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match=re.escape(f"load: no data set 'svhn', known are {', '.join(DATASETS)}")):
        load("svhn")
    assert {"digits", "mnist", "mnist-writers", "usps", "cifar10", "cifar100", "pacs", "hub:femnist"} <= set(DATASETS)
