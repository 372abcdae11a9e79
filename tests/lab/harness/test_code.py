"""The identity of code changes with every line that a result depends on, and with no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from maecho.aggregation import METHODS
from maecho.lab import networks
from maecho.lab.harness.code import NO_NUMBERS, Code, changed
from maecho.lab.harness.columns import code_of
from maecho.statistics import STATISTICS
from support.edited import Edit, editor, forget

COLUMNS = {name: {"method": name} for name in (*METHODS, "local", "pooled", "ensemble", "echo-relay")}


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Edit]:
    yield editor(monkeypatch, tmp_path)
    forget()


def codes() -> dict[str, Code]:
    return {name: code_of(options) for name, options in COLUMNS.items()}


def differ(before: dict[str, Code], after: dict[str, Code]) -> set[str]:
    return {name for name in before if before[name].digest != after[name].digest}


def test_a_line_changes_what_depends_on_it_and_nothing_else(edit: Edit) -> None:
    before = codes()
    edit("maecho.aggregation.regmean", "class RegMean:", "class RegMean:\n    another: int = 1\n")
    assert differ(before, codes()) == {"regmean"}


def test_the_iteration_belongs_to_ma_echo(edit: Edit) -> None:
    before = codes()
    edit("maecho.linalg.steps.iteration", "Alpha = Callable", "class Unused:\n    pass\n\n\nAlpha = Callable")
    assert differ(before, codes()) == set(), "a class that nobody uses"
    edit("maecho.linalg.steps.iteration", "anchored: bool = False", "anchored: bool = True")
    assert differ(before, codes()) == {"ma-echo", "ma-echo+ot"}


def test_a_statistic_belongs_to_the_methods_that_read_it(edit: Edit) -> None:
    before = codes()
    edit("maecho.statistics.gram", "class Gram(", "class Gram(object, ")
    readers = {name for name, method in METHODS.items() if "gram" in method.needs}
    assert readers
    assert differ(before, codes()) >= readers
    assert not differ(before, codes()) & {"fedavg", "local", "ensemble", "pooled"}


def test_how_accuracy_is_measured_belongs_to_all(edit: Edit) -> None:
    before = codes()
    edit("maecho.evaluation", "argmax(1)", "argmin(1)")
    assert differ(before, codes()) == set(COLUMNS)


def test_a_network_is_no_other_network(edit: Edit) -> None:
    before = {name: Code.of(build) for name, build in networks.NETWORKS.items()}
    edit("maecho.lab.networks", "mlp((64, 100, 50, 10))", "mlp((64, 101, 50, 10))")
    after = {name: Code.of(build) for name, build in networks.NETWORKS.items()}
    assert differ(before, after) == {"digits-mlp"}
    edit("maecho.lab.networks", "if k < last:", "if k <= last:")
    after = {name: Code.of(build) for name, build in networks.NETWORKS.items()}
    assert differ(before, after) == set(networks.NETWORKS), "all have fully connected layers"


def test_words_do_not_count(edit: Edit) -> None:
    before = codes()
    edit("maecho.aggregation.regmean", "class RegMean:\n", "# Why not.\nclass RegMean:\n")
    edit("maecho.lab.harness.columns", '"""The accuracy on the test examples', '"""On the test examples')
    assert differ(before, codes()) == set()


def test_modules_that_changed_are_named(edit: Edit) -> None:
    before = code_of({"method": "regmean"})
    edit("maecho.aggregation.regmean", "class RegMean:", "class RegMean:\n    another: int = 1\n")
    assert changed(before.modules, code_of({"method": "regmean"}).modules) == ["aggregation.regmean"]


def test_a_registered_function_counts_with_what_it_is_registered_with(edit: Edit) -> None:
    before = codes()
    edit("maecho.network.kinds.kind", "class Kind", "print()\n\n\nclass Kind")
    assert "regmean" in differ(before, codes()), "what a module runs when it is imported counts"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_depends_on_its_own_module_and_its_statistics(name: str) -> None:
    found = code_of({"method": name}).modules
    assert type(METHODS[name]).__module__ in found
    for statistic in METHODS[name].needs:
        assert type(STATISTICS[statistic]).__module__ in found
    assert not set(found) & NO_NUMBERS
    assert "maecho.lab.harness.columns" in found
    assert "maecho.upload.upload" in found
