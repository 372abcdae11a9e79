"""Figure 6a: the plane goes through its three points, and the heights are losses of models."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from maecho import aggregate
from maecho.lab import charts, data
from maecho.lab.studies.found import Found, Task
from maecho.lab.studies.surface import LossSurface, Plane, flat
from maecho.lab.training import LocalTraining

STUDY = LossSurface(
    data="digits", network="digits-mlp", steps=6, planes=((0, 1, 2), (0, 3, 6)), grid=5, examples=100,
    training=LocalTraining(epochs=3, learning_rate=0.05, batch_size=16),
)  # fmt: skip


def test_a_plane_goes_through_its_points() -> None:
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3)]
    plane = Plane.through(*points)
    assert float(plane.u @ plane.v) == pytest.approx(0, abs=1e-12)
    assert [float(plane.u.norm()), float(plane.v.norm())] == pytest.approx([1, 1])
    for point in points:
        torch.testing.assert_close(plane.point(*plane.coordinates(point)), point)
        assert math.isnan(plane.share(point)) or plane.share(point) == pytest.approx(1)
    assert plane.coordinates(points[0]) == (0, 0)
    assert plane.coordinates(points[1])[1] == pytest.approx(0, abs=1e-12)
    away = torch.randn(40, generator=generator, dtype=torch.float64)
    across = away - (away @ plane.u) * plane.u - (away @ plane.v) * plane.v
    assert plane.coordinates(points[0] + across) == pytest.approx((0, 0), abs=1e-12), "the projection is orthogonal"
    assert plane.share(points[0] + across) == pytest.approx(0, abs=1e-12)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAECHO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return STUDY(Task(0, data.digits()))


def test_the_heights_are_losses_of_models(found: Found) -> None:
    task = Task(0, data.digits())
    cohort = STUDY.cohort(task)
    uploads = STUDY.uploads(cohort, STUDY.trained(cohort, task, 0.0))
    x, y = task.data.x_test[:100], task.data.y_test[:100]

    def loss(steps: int) -> tuple[float, torch.Tensor]:
        weights = aggregate(uploads, "ma-echo", steps=steps)
        with torch.no_grad():
            return float(functional.cross_entropy(STUDY.model(weights)(x), y)), flat(weights)

    measured = {steps: loss(steps) for steps in (0, 1, 2, 3, 6)}
    for steps, (value, _) in measured.items():
        assert found.numbers[f"loss after step {steps}"] == pytest.approx(value, rel=1e-5)
    assert found.numbers["plane 0, 3, 6: loss where step 6 is projected"] == pytest.approx(measured[6][0], rel=1e-4)
    assert found.numbers["plane 0, 3, 6: share of the way that lies in it, per cent"] == pytest.approx(100)
    assert found.numbers["plane 0, 1, 2: share of the way that lies in it, per cent"] < 99.9
    for chart, steps in zip(found.charts, STUDY.planes, strict=True):
        assert isinstance(chart, charts.Surface)
        assert len(chart.path) == 7
        plane = Plane.through(*(measured[step][1] for step in steps))
        for step in steps:
            assert chart.points[f"step {step}"] == pytest.approx(plane.coordinates(measured[step][1]), abs=1e-4)
        # A corner of the grid, by another way to set the weights.
        corner = plane.point(chart.xs[0], chart.ys[-1]).float()
        model, start = STUDY.model(dict(uploads[0].weights)), 0
        for parameter in model.parameters():
            parameter.data = corner[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        with torch.no_grad():
            assert chart.values[-1][0] == pytest.approx(float(functional.cross_entropy(model(x), y)), rel=1e-3)
        assert min(chart.xs) < min(x for x, _ in chart.path)
        assert max(chart.ys) > max(y for _, y in chart.path)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="planes must be three rising steps up to 60 each, got \\[0, 2, 1\\]"):
        LossSurface(planes=((0, 2, 1),))
    with pytest.raises(ValueError, match="planes must be three rising steps up to 60 each, got \\[0, 2, 61\\]"):
        LossSurface(planes=((0, 2, 61),))
    with pytest.raises(ValueError, match="grid must be at least 2"):
        LossSurface(grid=1)
