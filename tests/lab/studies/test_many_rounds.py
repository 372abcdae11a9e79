"""Figure 9: the clients are what the config says, the curves are those of the engine, and a stopped run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maecho import InputError
from maecho.lab import charts, data, networks
from maecho.lab.studies import many_rounds
from maecho.lab.studies.found import Found, Task
from maecho.lab.studies.many_rounds import ManyRounds, Method
from maecho.lab.training import LocalTraining
from maecho.rounds import Local, Merging, Rounds
from maecho.rounds.peers import Average
from maecho.rounds.training.losses import OwnClasses

STUDY = ManyRounds(
    data="digits", network="digits-mlp", clients=10, sampled=4, classes=2, rounds=6, means=((1, 3), (5, 6)),
    training=LocalTraining(epochs=3, learning_rate=0.05, batch_size=16),
    methods={
        "fedavg": Method(server="fedavg"),
        "regmean": Method(server="regmean", options={"kept": 0.5}, loss="own-classes", clip=1.0),
    },
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def found() -> Found:
    return STUDY(Task(0, data.digits()))


def lines(found: Found) -> dict[str, list[list[float]]]:
    (chart,) = found.charts
    assert isinstance(chart, charts.Lines)
    return chart.series


def test_every_client_has_its_classes() -> None:
    digits = data.digits()
    parts = STUDY.parts(digits, 0)
    assert len(parts) == 10
    assert [len(set(digits.y_train[torch.from_numpy(part)].tolist())) for part in parts] == [2] * 10
    assert sorted(int(i) for part in parts for i in part) == list(range(len(digits.y_train)))
    again, other = STUDY.parts(digits, 0), STUDY.parts(digits, 1)
    assert all((one == two).all() for one, two in zip(parts, again, strict=True))
    assert any(len(one) != len(two) or (one != two).any() for one, two in zip(parts, other, strict=True))


def test_clients_may_be_origins() -> None:
    digits = data.digits()
    origins = torch.arange(len(digits.y_train)) % 20
    named = replace(digits, groups_train=origins, groups_test=torch.arange(len(digits.y_test)) % 20,
                    group_names=tuple(map(str, range(20))))  # fmt: skip
    parts = replace(STUDY, split="origins").parts(named, 0)
    held = [set(origins[torch.from_numpy(part)].tolist()) for part in parts]
    assert sum(map(len, held)) == 20 == len(set().union(*held)), "nobody's examples are with two clients"
    with pytest.raises(InputError, match="split: digits must say where its examples come from, got none"):
        replace(STUDY, split="origins").parts(digits, 0)


def test_the_settings_become_runs() -> None:
    run = STUDY.run("regmean", 3)
    assert run == Rounds(6, 4, Merging("regmean", kept=0.5), Local(3, 0.05, 0.5, 16, 1.0, OwnClasses()), 3)
    assert STUDY.run("fedavg", 3) == Rounds(6, 4, Average(), Local(3, 0.05, 0.5, 16), 3)


def test_curves_and_numbers_are_of_the_same_run(found: Found) -> None:
    series = lines(found)
    assert list(series) == ["fedavg", "regmean"]
    for name, points in series.items():
        assert [number for number, _ in points] == [1, 2, 3, 4, 5, 6]
        heights = [height for _, height in points]
        assert found.numbers[f"{name}: mean of rounds 1 to 3"] == pytest.approx(sum(heights[:3]) / 3)
        assert found.numbers[f"{name}: lowest of rounds 5 to 6"] == pytest.approx(min(heights[4:]))
        for level in many_rounds.LEVELS:
            first = next((k for k, height in points if height >= level), None)
            assert found.numbers.get(f"{name}: rounds to {level} per cent") == first
    assert series["regmean"][-1][1] > series["fedavg"][-1][1]


def test_accuracies_are_those_on_the_test_images(tmp_path: Path) -> None:
    """After one round of FedAvg in which all clients take part, measured here, on the test images and on the others."""
    digits = data.digits()
    study = replace(STUDY, rounds=1, sampled=10, means=((1, 1),), methods={"fedavg": Method(server="fedavg")})
    found = study(Task(0, digits))
    (path,) = (tmp_path / "rounds").glob("*.safetensors")
    weights = {name.removeprefix("model/"): t for name, t in load_file(path).items() if name.startswith("model/")}
    model = networks.build("digits-mlp", torch.Generator())
    model.load_state_dict(weights)
    on_test, on_training = (
        100 * float((model(x).argmax(1) == y).float().mean())
        for x, y in ((digits.x_test, digits.y_test), (digits.x_train, digits.y_train))
    )
    assert abs(on_test - on_training) > 0.1, "data that can be told apart"
    ((_, height),) = lines(found)["fedavg"]
    assert height == pytest.approx(on_test, abs=1e-3)


def test_when_every_class_has_been_drawn(found: Found) -> None:
    digits = data.digits()
    held = [set(digits.y_train[torch.from_numpy(part)].tolist()) for part in STUDY.parts(digits, 0)]
    seen: set[int] = set()
    first = None
    for number in range(1, 7):
        seen |= {label for client in STUDY.run("fedavg", 0).sample(number, 10) for label in held[client]}
        first = number if first is None and len(seen) == 10 else first
    assert first is not None
    assert found.numbers["first round by which every class has been drawn"] == first
    after = [height for k, height in lines(found)["regmean"] if k >= first]
    key = "regmean: lowest from the round on by which every class has been drawn"
    assert found.numbers[key] == pytest.approx(min(after))
    one = replace(STUDY, rounds=1, means=((1, 1),), sampled=1)(Task(0, digits))
    assert "first round by which every class has been drawn" not in one.numbers


def test_a_stopped_run_goes_on(found: Found, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache is not run again; what is missing is, and ends as it would have."""
    files = sorted((cache / "rounds").iterdir())
    assert len([path for path in files if path.suffix == ".safetensors"]) == 2
    told: list[str] = []
    again = STUDY(Task(0, data.digits(), tell=lambda share, text: told.append(text)))
    assert not told
    assert lines(again) == lines(found)
    for path in files:
        path.unlink()
    shorter = replace(STUDY, rounds=3, means=((1, 3),))
    assert [points[:3] for points in lines(found).values()] == list(lines(shorter(Task(0, data.digits()))).values())


def test_another_method_is_another_run(found: Found, cache: Path) -> None:
    before = set((cache / "rounds").iterdir())
    changed = replace(STUDY, methods={**STUDY.methods, "fedavg": Method(server="fedprox")})
    changed(Task(0, data.digits()))
    new = {path for path in (cache / "rounds").iterdir() if path.suffix == ".safetensors"} - before
    assert len(new) == 1, "the other method's run is the one that is there"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"network": "vgg"}, "network must be among"),
        ({"methods": {}}, "methods must be at least one, got none"),
        ({"means": ((1, 60),)}, r"means must be over rounds from 1 to 6, got \[\[1, 60\]\]"),
        ({"sampled": 11}, "sampled must be from 1 to the number of clients, 10, got 11"),
        ({"methods": {"a": Method(server="nope")}}, "methods: a: server must be one of"),
        ({"methods": {"a": Method(server="fedavg", loss="x")}}, "methods: a: loss must be among .* got 'x'"),
        ({"methods": {"a": Method(server="fedavg", clip=-1)}}, "methods: a: clip must be positive and finite, got -1"),
        ({"training": LocalTraining(weight_decay=0.1)}, "weight_decay and steps are not for many rounds"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        replace(STUDY, **changes)
