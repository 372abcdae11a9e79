"""Figure 8: the curves are those of the models that MA-Echo makes, and settings are checked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maecho import aggregate, evaluate
from maecho.lab import charts, data
from maecho.lab.studies.found import Task
from maecho.lab.studies.penalty import Penalty
from maecho.lab.training import LocalTraining

STUDY = Penalty(
    data="digits", network="digits-mlp", clients=3, beta=0.1, steps=5, watched=(0, 2, 5), mus=(1.0, 200.0),
    forms=("printed", "anchored"), examples=50, training=LocalTraining(epochs=1, learning_rate=0.05, batch_size=16),
)  # fmt: skip


def test_the_curves_are_those_of_the_models() -> None:
    task = Task(0, data.digits())
    found = STUDY(task)
    assert [chart.title for chart in found.charts] == [
        "Accuracy of the global model, printed",
        "Accuracy of the global model, anchored",
        "What clients lose on their own data, printed, μ = 1",
        "What clients lose on their own data, printed, μ = 200",
        "What clients lose on their own data, anchored, μ = 1",
        "What clients lose on their own data, anchored, μ = 200",
    ]
    cohort = STUDY.cohort(task)
    models = STUDY.trained(cohort, task, 0.0)
    uploads = STUDY.uploads(cohort, models)
    for k, form in enumerate(STUDY.forms):
        curves = found.charts[k]
        assert isinstance(curves, charts.Lines)
        for mu in STUDY.mus:
            for steps, shown in curves.series[f"μ = {mu:g}"]:
                merged = aggregate(uploads, "ma-echo", form=form, mu=mu, projector="batch-mean", steps=int(steps))
                test = data.batches(task.data.x_test, task.data.y_test, 500)
                assert shown == pytest.approx(100 * evaluate(STUDY.model(merged), test).accuracy)
    assert (
        found.numbers["printed, μ = 1: global accuracy after the last step"] == found.charts[0].series["μ = 1"][-1][1]
    )


def test_the_best_is_the_highest_of_its_curve() -> None:
    found = STUDY(Task(0, data.digits()))
    rising = []
    for k, form in enumerate(STUDY.forms):
        curves = found.charts[k]
        assert isinstance(curves, charts.Lines)
        for name, points in curves.series.items():
            heights = [value for _, value in points]
            assert found.numbers[f"{form}, {name}: best global accuracy"] == max(heights)
            rising.append(max(heights) > min(heights))
    assert any(rising)
    for chart in found.charts:
        assert isinstance(chart, charts.Lines)
        assert (chart.x, chart.y) == ("step", "per cent" if chart.title.startswith("Accuracy") else "points")
    assert Penalty().mus == (1, 200), "the paper's"


def test_what_clients_lose_is_against_their_own_models() -> None:
    """In the anchored form V_i = W_i + (W − W_i)(I − μ/(1+μ) P_i), here written out."""
    task = Task(0, data.digits())
    found = STUDY(task)
    cohort = STUDY.cohort(task)
    models = STUDY.trained(cohort, task, 0.0)
    uploads = STUDY.uploads(cohort, models)
    before = aggregate(uploads, "ma-echo", form="anchored", mu=200.0, projector="batch-mean", steps=5)

    def right(weights: dict[str, Tensor]) -> float:
        index = torch.from_numpy(cohort.parts[1][:50])
        x, y = task.data.x_train[index], task.data.y_train[index]
        return 100 * evaluate(STUDY.model(weights), [(x, y)]).accuracy

    V = {}
    for layer in uploads[1].layers:
        W, own = before[layer.weight].double(), uploads[1].weights[layer.weight].double()
        P = uploads[1].statistics["projector"][layer.name].dense()[0].double()
        V[layer.weight] = (own + (W - own) @ (torch.eye(len(P)) - 200 / 201 * P)).float()
    chart = found.charts[5]
    assert isinstance(chart, charts.Lines)
    assert chart.series["client 2"][-1][1] == pytest.approx(right(V) - right(dict(uploads[1].weights)), abs=1e-9)
    assert chart.series["client 2"][0][1] == 0, "before the first step V is W_i"


def test_a_larger_mu_keeps_the_clients_models() -> None:
    numbers = STUDY(Task(0, data.digits())).numbers
    for form in STUDY.forms:
        lost = [numbers[f"{form}, μ = {mu}: points that clients lose on their own data, mean"] for mu in (1, 200)]
        assert lost[1] <= lost[0]


def test_settings_are_checked() -> None:
    for wrong in ((1, 2), (0, 2, 2), (0, 61), ()):
        with pytest.raises(ValueError, match="watched must rise from 0 to at most 60 steps"):
            Penalty(watched=wrong)
    with pytest.raises(ValueError, match="mu must be positive and finite, got 0"):
        Penalty(mus=(0.0,))
    with pytest.raises(ValueError, match="examples, mus and forms must be at least one each"):
        Penalty(mus=())
