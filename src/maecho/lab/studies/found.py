"""What a study is asked, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from maecho.lab.charts import Chart
from maecho.lab.data import Dataset

Tell = Callable[[float, str], None]
"""Called with the share of a run that is done, and with what comes next."""


@dataclass(frozen=True, eq=False)
class Task:
    """One run of a study: a seed, and what it needs."""

    seed: int
    dataset: Dataset | None = None
    """The data set that the study asks for. None: it asks for none."""
    device: str = "cpu"
    tell: Tell = lambda share, text: None

    @property
    def data(self) -> Dataset:
        """The data set of a study that asks for one."""
        assert self.dataset is not None
        return self.dataset


@dataclass(frozen=True)
class Found:
    """The result of one run."""

    numbers: Mapping[str, float]
    """What was measured -> the figure."""
    charts: Sequence[Chart]


@runtime_checkable
class Question(Protocol):
    """A study with its settings: a frozen dataclass that can be called."""

    @property
    def data(self) -> str:
        """The name of the data set that it asks for. Empty: none."""
        ...

    @property
    def rows(self) -> tuple[Any, ...]:
        """The rows of tables of alternatives (networks, statistics) that it uses. They count as its code."""
        ...

    def __call__(self, task: Task) -> Found: ...
