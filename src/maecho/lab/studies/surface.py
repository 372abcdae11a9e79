"""The loss on planes through iterates of MA-Echo, and the way of the iterates over them (Figure 6a).

A plane goes through three iterates g⁰, g¹, g² of the whole network as one vector: û along g¹ − g⁰, v̂ along what of
g² − g⁰ is orthogonal to it. All other iterates are projected on the plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from maecho.aggregation.ma_echo import Iteration, MAEcho
from maecho.lab.charts import Surface
from maecho.lab.studies.clients import Clients
from maecho.lab.studies.found import Found, Task

MARGIN = 0.35
"""How far the picture goes beyond the way of the iterates, as a share of its length."""


@dataclass(frozen=True, kw_only=True)
class LossSurface(Clients):
    """The global model's test loss around the iterates of MA-Echo as released."""

    steps: int = 60
    planes: tuple[tuple[int, int, int], ...] = ((0, 1, 2), (0, 10, 60))
    """The steps through whose iterates each plane goes."""
    grid: int = 25
    """Points of the grid along each axis."""
    examples: int = 2000
    """How many test examples the loss is measured on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for plane in self.planes:
            if not 0 <= plane[0] < plane[1] < plane[2] <= self.steps:
                raise ValueError(f"planes must be three rising steps up to {self.steps} each, got {list(plane)}")
        if self.grid < 2 or self.examples < 1 or not self.planes:
            raise ValueError("grid must be at least 2, examples and planes at least one, got fewer")
        MAEcho(steps=self.steps)

    def __call__(self, task: Task) -> Found:
        cohort = self.cohort(task)
        models = self.trained(cohort, task, 0.3)
        iterates: list[Tensor] = []

        def watch(iteration: Iteration) -> None:
            iterates.append(flat(iteration.merged()))

        final = MAEcho(steps=self.steps, watch=watch)(self.uploads(cohort, models))
        landscape = Landscape(self, final, task)
        numbers: dict[str, float] = {
            f"loss after step {step}": landscape.loss(iterates[step])
            for step in sorted({0, self.steps, *(step for plane in self.planes for step in plane)})
        }
        charts = []
        for turn, steps in enumerate(self.planes):
            plane = Plane.through(*(iterates[step] for step in steps))
            words = ", ".join(map(str, steps))

            def tell(share: float, turn: int = turn, words: str = words) -> None:
                task.tell(0.3 + 0.7 * (turn + share) / len(self.planes), f"the plane through steps {words}")

            way = [plane.coordinates(g) for g in iterates]
            xs, ys = _axis([x for x, _ in way], self.grid), _axis([y for _, y in way], self.grid)
            values = []
            for i, y in enumerate(ys):
                tell(i / len(ys))
                values.append([landscape.loss(plane.point(x, y)) for x in xs])
            named = {f"step {step}": list(way[step]) for step in sorted({*steps, self.steps})}
            charts.append(
                Surface(
                    f"Test loss on the plane through steps {words}",
                    "û",
                    "v̂",
                    xs,
                    ys,
                    values,
                    [[*p] for p in way],
                    named,
                )
            )
            numbers |= {
                f"plane {words}: loss where step {self.steps} is projected": landscape.loss(plane.point(*way[-1])),
                f"plane {words}: share of the way that lies in it, per cent": 100 * plane.share(iterates[-1]),
                f"plane {words}: lowest loss in the picture": min(min(row) for row in values),
            }
        return Found(numbers, charts)


@dataclass(frozen=True, eq=False)
class Plane:
    """g⁰ + x û + y v̂"""

    origin: Tensor
    u: Tensor
    v: Tensor

    @classmethod
    def through(cls, origin: Tensor, first: Tensor, second: Tensor) -> Plane:
        u = first - origin
        u = u / u.norm()
        v = second - origin
        v = v - (v @ u) * u
        return cls(origin, u, v / v.norm())

    def coordinates(self, g: Tensor) -> tuple[float, float]:
        """Where the projection of a point lies."""
        return float((g - self.origin) @ self.u), float((g - self.origin) @ self.v)

    def point(self, x: float, y: float) -> Tensor:
        return self.origin + x * self.u + y * self.v

    def share(self, g: Tensor) -> float:
        """How much of the distance from g⁰ to g lies in the plane."""
        x, y = self.coordinates(g)
        return float(torch.tensor([x, y], dtype=torch.float64).norm() / (g - self.origin).norm())


class Landscape:
    """The test loss of the network as a function of all its weights in one vector."""

    def __init__(self, study: LossSurface, weights: dict[str, Tensor], task: Task):
        self._model = study.model(weights).to(task.device)
        self._x = task.data.x_test[: study.examples].to(task.device)
        self._y = task.data.y_test[: study.examples].to(task.device)

    @torch.no_grad()
    def loss(self, vector: Tensor) -> float:
        start = 0
        for tensor in self._model.state_dict().values():
            tensor.copy_(vector[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
        return float(functional.cross_entropy(self._model(self._x), self._y))


def flat(weights: dict[str, Tensor]) -> Tensor:
    """All weights in one vector, in float64."""
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in weights.values()])


def _axis(places: Sequence[float], grid: int) -> list[float]:
    """Places on an axis that cover these and a margin."""
    low, high = min(places), max(places)
    margin = MARGIN * (high - low)
    return [low - margin + (high - low + 2 * margin) * k / (grid - 1) for k in range(grid)]
