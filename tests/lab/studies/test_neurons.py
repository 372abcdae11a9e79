"""Figure 5: matching has its known values, and OT and MA-Echo do what the figure shows."""

from __future__ import annotations

import numpy as np
import pytest

from maecho import InputError
from maecho.lab import charts, data
from maecho.lab.studies.found import Found, Task
from maecho.lab.studies.neurons import Neurons, apart, matched
from maecho.lab.training import LocalTraining

STUDY = Neurons(
    data="digits", network="digits-mlp", layer="fc2", steps=(1, 6), perplexity=8.0, examples=60,
    training=LocalTraining(epochs=5, learning_rate=0.05, batch_size=16),
)  # fmt: skip


def test_matching() -> None:
    rows = np.random.default_rng(0).standard_normal((30, 8))
    assert matched([rows, rows + 1e-3]) == 1
    assert matched([rows, np.roll(rows, 1, 0)]) == 0
    half = rows.copy()
    half[:15] = np.roll(half[:15], 1, 0)
    assert matched([rows, half]) == 0.5
    # The nearest by distances one by one.
    other = np.random.default_rng(1).standard_normal((30, 8))
    near = [min(range(30), key=lambda k: float(np.linalg.norm(a - other[k]))) for a in rows]
    back = [min(range(30), key=lambda k: float(np.linalg.norm(b - rows[k]))) for b in other]
    both = [sum(k == i for i, k in enumerate(found)) / 30 for found in (near, back)]
    assert matched([rows, other]) == pytest.approx(sum(both) / 2)


def test_distances() -> None:
    rows = np.eye(4)
    assert apart([rows, rows]) == 0
    assert apart([rows, -rows]) == pytest.approx(2)
    assert apart([rows, np.roll(rows, 1, 0)]) == pytest.approx(np.sqrt(2))
    assert apart([5 * rows, -5 * rows]) == pytest.approx(2), "a share"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAECHO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return STUDY(Task(0, data.digits()))


def test_neurons_come_together(found: Found) -> None:
    panels = ["original", "after OT", "MA-Echo, step 1", "MA-Echo, step 6"]
    match, distance, right = (
        [found.numbers[f"{panel}: {what}"] for panel in panels]
        for what in (
            "neurons that match, per cent",
            "distance of a neuron from its match, as a share of its length",
            "accuracy of the clients' models on their own data",
        )
    )
    assert match[0] < 15, "different initialisations have nothing in common"
    assert match[1] > match[0]
    assert match[2] > 90
    assert match[3] == 100
    assert distance[1] < distance[0]
    assert distance[3] < distance[0] / 2
    assert right[1] == pytest.approx(right[0], abs=1e-9), "a permutation changes no output"
    assert [chart.title for chart in found.charts] == [
        f"{panel} ({value:.2f})" for panel, value in zip(panels, right, strict=True)
    ]
    for chart in found.charts:
        assert isinstance(chart, charts.Scatter)
        assert {name: len(points) for name, points in chart.groups.items()} == {f"client {i}": 50 for i in (1, 2, 3)}


def test_the_map_keeps_neighbours(found: Found) -> None:
    """On the last map, points of one number lie together."""
    chart = found.charts[-1]
    assert isinstance(chart, charts.Scatter)
    assert matched([np.array(points) for points in chart.groups.values()]) > 0.6


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"steps must be a rising list of whole numbers, got \[3, 1\]"):
        Neurons(steps=(3, 1))
    with pytest.raises(ValueError, match="perplexity and examples must be positive, got 0"):
        Neurons(perplexity=0.0)
    with pytest.raises(InputError, match="layer must be among fc1, fc2, fc3, got 'fc9'"):
        Neurons(data="digits", network="digits-mlp", layer="fc9", training=LocalTraining(epochs=1, batch_size=256))(
            Task(0, data.digits())
        )
