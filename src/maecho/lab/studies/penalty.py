"""What μ does: the global model's accuracy, and what the clients' models lose on their own data (Figure 8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from torch import Tensor

from maecho.aggregation.ma_echo import Iteration, MAEcho
from maecho.lab.charts import Lines, Points
from maecho.lab.harness.clients import Cohort
from maecho.lab.studies.clients import Clients, accuracy, own_examples
from maecho.lab.studies.found import Found, Task

Form = Literal["printed", "anchored"]


@dataclass(frozen=True, kw_only=True)
class Penalty(Clients):
    """MA-Echo with several μ, in one form or several."""

    forms: tuple[Form, ...] = ("printed",)
    mus: tuple[float, ...] = (1.0, 200.0)
    projector: Literal["batch-mean", "exact"] = "batch-mean"
    steps: int = 60
    step_size: float = 0.5
    watched: tuple[int, ...] = (0, 1, 2, 3, 5, 8, 12, 20, 30, 45, 60)
    """The steps after which accuracies are measured."""
    examples: int = 2000
    """How many of its own examples a client's accuracy is measured on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.watched or sorted({0, *self.watched}) != list(self.watched) or self.watched[-1] > self.steps:
            raise ValueError(f"watched must rise from 0 to at most {self.steps} steps, got {list(self.watched)}")
        if self.examples < 1 or not self.mus or not self.forms:
            raise ValueError("examples, mus and forms must be at least one each, got none")
        for form in self.forms:
            for mu in self.mus:
                self.method(form, mu)

    def method(self, form: Form, mu: float, watch: Callable[[Iteration], None] | None = None) -> MAEcho:
        return MAEcho(
            form=form, mu=mu, projector=self.projector, steps=self.steps, step_size=self.step_size, watch=watch
        )

    def __call__(self, task: Task) -> Found:
        cohort = self.cohort(task)
        models = self.trained(cohort, task, 0.3)
        uploads = self.uploads(cohort, models)
        numbers: dict[str, float] = {}
        charts: list[Lines] = []
        turns = [(form, mu) for form in self.forms for mu in self.mus]
        global_curves: dict[str, dict[str, Points]] = {form: {} for form in self.forms}
        before = [accuracy(model, *own_examples(cohort, i, self.examples)) for i, model in enumerate(models)]
        for turn, (form, mu) in enumerate(turns):
            task.tell(0.3 + 0.7 * turn / len(turns), f"{form}, μ = {mu:g}")
            watch = _Accuracies(self, cohort, task)
            self.method(form, mu, watch)(uploads)
            global_curves[form][f"μ = {mu:g}"] = watch.merged
            lost = {
                f"client {i + 1}": [[step, value - before[i]] for step, value in curve]
                for i, curve in enumerate(watch.clients)
            }
            charts.append(Lines(f"What clients lose on their own data, {form}, μ = {mu:g}", "step", "points", lost))
            words = f"{form}, μ = {mu:g}"
            numbers[f"{words}: global accuracy after the last step"] = watch.merged[-1][1]
            numbers[f"{words}: best global accuracy"] = max(value for _, value in watch.merged)
            numbers[f"{words}: points that clients lose on their own data, mean"] = -fmean(
                curve[-1][1] for curve in lost.values()
            )
        numbers["accuracy of the clients' own models on their own data"] = fmean(before)
        first = [
            Lines(f"Accuracy of the global model, {form}", "step", "per cent", curves)
            for form, curves in global_curves.items()
        ]
        return Found(numbers, [*first, *charts])


class _Accuracies:
    """Measures the global model on the test, and each client's V_i on the client's own data."""

    def __init__(self, study: Penalty, cohort: Cohort, task: Task):
        self._study, self._cohort, self._task = study, cohort, task
        self.merged: Points = []
        self.clients: list[Points] = [[] for _ in cohort.parts]

    def __call__(self, iteration: Iteration) -> None:
        if iteration.step not in self._study.watched:
            return
        dataset = self._cohort.dataset
        self.merged.append([iteration.step, self._accuracy(iteration.merged(), dataset.x_test, dataset.y_test)])
        for i, curve in enumerate(self.clients):
            x, y = own_examples(self._cohort, i, self._study.examples)
            curve.append([iteration.step, self._accuracy(iteration.client(i), x, y)])

    def _accuracy(self, weights: object, x: Tensor, y: Tensor) -> float:
        return accuracy(self._study.model(weights).to(self._task.device), x, y)
