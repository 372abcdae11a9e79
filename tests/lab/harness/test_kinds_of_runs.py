"""Runs that are no Dirichlet split over a trained classifier: other splits, features of a frozen backbone, clients
without training, training that differs from row to row, and curves over a method's steps."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import InputError, aggregate, backbones, make_upload
from maecho.backbones import Backbone
from maecho.lab import data, networks
from maecho.lab.data import Dataset
from maecho.lab.experiment import Experiment, Features
from maecho.lab.harness import inputs
from maecho.lab.harness.clients import Cohort
from maecho.lab.harness.runs import reproduce
from maecho.lab.training import LocalTraining

BASE = Experiment(
    name="kinds",
    title="Kinds of runs",
    data="digits",
    network="digits-mlp",
    seeds=(0,),
    cells=({"clients": 2, "beta": 0.5, "init": "same"},),
    methods={"local": {"method": "local"}},
    training=LocalTraining(epochs=1, learning_rate=0.05, batch_size=64),
)
ORIGINS = 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_origins() -> Dataset:
    """The digits. The first ones come from origin 0, the next from origin 1, and so on."""
    digits = data.digits()
    train, test = (torch.arange(len(y)) * ORIGINS // len(y) for y in (digits.y_train, digits.y_test))
    return replace(digits, groups_train=train, groups_test=test, group_names=("a", "b", "c", "d"))


def test_clients_hold_whole_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = with_origins()
    monkeypatch.setitem(data.DATASETS, "origins", lambda: origins)
    config = replace(BASE, data="origins", split="groups", cells=({"clients": 4}, {"clients": 8}))
    one, two = (Cohort.of(config, cell, 0, origins) for cell in config.cells)
    assert origins.groups_train is not None
    assert [len(set(origins.groups_train[part].tolist())) for part in (*one.parts, *two.parts)] == [1] * 12
    results = reproduce(config, tmp_path)
    assert [len(run["partition"]) for run in results["runs"]] == [4, 8]


def test_a_split_by_groups_needs_groups() -> None:
    with pytest.raises(InputError, match=r"split: digits must say where its examples come from .* got none"):
        Cohort.of(replace(BASE, split="groups"), {"clients": 2}, 0, data.digits())


def test_clients_hold_the_labels_that_the_cell_lists(tmp_path: Path) -> None:
    config = replace(BASE, split="labels", cells=({"labels": [[0, 1, 3, 4, 7], [2, 5, 6, 8, 9]]},))
    (run,) = reproduce(config, tmp_path)["runs"]
    held = [{label for label, count in enumerate(counts) if count} for counts in run["partition"]]
    assert held == [{0, 1, 3, 4, 7}, {2, 5, 6, 8, 9}]


def test_another_split_has_another_stream() -> None:
    """Also where the entries of the cells are equal: the streams must not repeat each other."""
    cell = {"clients": 2}
    draws = [
        Cohort.of(replace(BASE, split=split), given, 0, with_origins()).streams.partition().random()
        for split, given in (("groups", cell), ("dirichlet", {**cell, "beta": 0.5}))
    ]
    assert draws[0] != draws[1]


def test_a_row_of_its_own_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ in their steps alone start from the same weights, on the same parts, in the same order."""
    seen: list[tuple[int | None, int, Tensor, Tensor]] = []

    def fit(self: LocalTraining, model: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator) -> None:
        seen.append((self.steps, rng.initial_seed(), x, next(model.parameters()).detach().clone()))

    monkeypatch.setattr(LocalTraining, "__call__", fit)
    cell = {"clients": 1, "beta": 0.5, "init": "same"}
    reproduce(replace(BASE, cells=({**cell, "steps": 3}, {**cell, "steps": 9})), tmp_path)
    (few, *first), (many, *second) = seen
    assert (few, many) == (3, 9)
    assert first[0] == second[0]
    assert all(torch.equal(one, other) for one, other in zip(first[1:], second[1:], strict=True))


def test_a_curve_over_steps(tmp_path: Path) -> None:
    """The last point is the column's accuracy, the first that of the start, and the curve changes no result."""
    columns = {
        "ma-echo": {"method": "ma-echo"},
        "watched": {"method": "ma-echo", "steps": 4, "curve": [0, 1, 4]},
        "four": {"method": "ma-echo", "steps": 4},
        "none": {"method": "ma-echo", "steps": 0},
        "one": {"method": "ma-echo", "steps": 1},
    }
    (run,) = reproduce(replace(BASE, methods=columns), tmp_path)["runs"]
    accuracy = {name: record["accuracy"] for name, record in run["columns"].items()}
    assert run["columns"]["watched"]["curve"] == [[0, accuracy["none"]], [1, accuracy["one"]], [4, accuracy["four"]]]
    assert accuracy["watched"] == accuracy["four"]
    assert "curve" not in run["columns"]["four"]
    assert len({accuracy["none"], accuracy["one"], accuracy["four"]}) == 3, "points that could be told apart"


def test_measuring_a_curve_is_no_part_of_merging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any) -> float:
        time.sleep(0.5)
        return 50.0

    monkeypatch.setattr("maecho.lab.harness.columns.accuracy", slow)
    columns = {"watched": {"method": "ma-echo", "steps": 3, "curve": [0, 1, 2, 3]}}
    (run,) = reproduce(replace(BASE, methods=columns), tmp_path)["runs"]
    assert 0 <= run["columns"]["watched"]["seconds"]["merging"] < 1


def test_clients_without_training(tmp_path: Path) -> None:
    """AFL on a single layer is exact: it equals AFL with all data in one hand, and nobody trains for it."""
    columns = {"afl, one layer": {"method": "afl", "network": "digits-linear", "backbone": "average"}}
    (run,) = reproduce(replace(BASE, methods=columns), tmp_path)["runs"]
    record = run["columns"]["afl, one layer"]
    assert record["seconds"]["training"] == 0
    digits = data.digits()
    model = networks.build("digits-linear", torch.Generator().manual_seed(0))
    upload = make_upload(model, data.batches(digits.x_train, digits.y_train), "all", ["gram", "targets"], rank=None)
    model.load_state_dict(aggregate([upload], "afl", backbone="average"))
    answers = model(digits.x_test).argmax(1)
    assert record["accuracy"] == pytest.approx(100 * float((answers == digits.y_test).float().mean()), abs=0.3)


class Means(nn.Module):
    """A backbone for tests: the mean of each channel's quarters."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The backbone `means`; how many images it has seen, batch by batch."""
    seen: list[int] = []

    class Counting(Means):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    monkeypatch.setitem(backbones.BACKBONES, "means", None)  # type: ignore[arg-type]
    monkeypatch.setattr(inputs.data, "backbone", lambda name, side: Backbone(Counting(), side))
    monkeypatch.setitem(networks.NETWORKS, "on-means", lambda: networks.mlp((12, 10)))
    return seen


def test_features_of_a_backbone_are_computed_once(tmp_path: Path, counted: list[int], cache: Path) -> None:
    config = replace(BASE, network="on-means", features=Features("means", 8))
    digits = data.digits()
    loaded = inputs.load(config)
    assert loaded.x_train.shape == (len(digits.y_train), 12)
    assert torch.equal(loaded.y_test, digits.y_test)
    expected = Backbone(Means(), 8)(digits.pixels(digits.x_test))
    torch.testing.assert_close(loaded.x_test, expected)
    assert sum(counted) == len(digits.y_train) + len(digits.y_test)
    (run,) = reproduce(config, tmp_path)["runs"]
    assert run["data"] == loaded.digest != digits.digest
    assert sum(counted) == len(digits.y_train) + len(digits.y_test), "read from the cache"
    # Another size of images is another set of features; a damaged file is replaced.
    assert inputs.load(replace(config, features=Features("means", 9))).digest != loaded.digest
    before = sum(counted)
    for path in (cache / "features").glob("*.safetensors"):
        path.write_bytes(b"damaged")
    again = inputs.load(config)
    assert sum(counted) > before
    assert torch.equal(again.x_train, loaded.x_train)
    assert again.digest == loaded.digest


def test_features_need_images(counted: list[int]) -> None:
    flat = replace(data.digits(), x_train=data.digits().x_train.flatten(1), x_test=data.digits().x_test.flatten(1))
    with pytest.raises(InputError, match=r"features: digits must have images \[channels, height, width\], got \[64\]"):
        inputs.of_backbone(flat, Backbone(Means(), 8))


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "a split that is not known": ("split: 'random', known are dirichlet, groups, labels", {"split": "random"}),
    "no beta": ("beta", {"cells": ({"clients": 2},)}),
    "an entry that means nothing": ("'betta', known are clients, beta, init", {
        "cells": ({"clients": 2, "beta": 0.5, "betta": 1},)}),
    "labels that are no list": ("labels must list the labels of every client", {
        "split": "labels", "cells": ({"labels": 3},)}),
    "labels of which one is none": ("labels must list the labels of every client", {
        "split": "labels", "cells": ({"labels": [[0, 1], [2, -3]]},)}),
    "an option of a method that it has not": ("got 'stps'", {
        "methods": {"a": {"method": "ma-echo", "stps": 3}}}),
    "no steps": ("steps must be at least 1", {"cells": ({"clients": 2, "beta": 0.5, "steps": 0},)}),
    "a curve of what has no steps": ("curve: fedavg has no steps", {
        "methods": {"fedavg": {"method": "fedavg", "curve": [1]}}}),
    "a curve that falls": ("rising list", {"methods": {"ma-echo": {"method": "ma-echo", "curve": [2, 1]}}}),
    "a network of local": ("network: local has only the clients' own", {
        "methods": {"a": {"method": "local", "network": "digits-linear"}}}),
    "an unknown network": ("network must be among", {"methods": {"a": {"method": "afl", "network": "vgg"}}}),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_config_says_what_it_is(case: str) -> None:
    part, changes = MISTAKES[case]
    with pytest.raises((ValueError, KeyError), match=re.escape(part)):
        replace(BASE, **changes)._check(())


def test_a_backbone_that_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"features: backbone must be among mobilenet-v2, .* got 'vgg'"):
        Features("vgg")
    with pytest.raises(ValueError, match=r"side must be a positive whole number, got 0"):
        Features("mobilenet-v2", 0)
