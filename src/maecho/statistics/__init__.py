"""The statistics that a client can send about its data: one table, STATISTICS, and one file for each statistic."""

from maecho.statistics.classes import Classes
from maecho.statistics.features import Features
from maecho.statistics.fisher import FisherDiagonal
from maecho.statistics.gradients import Gradients
from maecho.statistics.gram import Gram
from maecho.statistics.moments import Moments
from maecho.statistics.projector import Projector
from maecho.statistics.statistic import Gatherer, NotGathered, Options, Statistic
from maecho.statistics.targets import Targets

STATISTICS: dict[str, Statistic] = {
    "gram": Gram(),
    "projector": Projector(),
    "classes": Classes(),
    "moments": Moments(),
    "features": Features(),
    "targets": Targets(),
    "fisher": FisherDiagonal(),
    "gradients": Gradients(),
}
"""Every statistic that can be gathered, by name. Each method says which of them it needs."""

NEEDED_BY: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
"""Name of a method -> the statistics that it needs, and those that it reads if they are there. Methods
take uploads, so nothing here can know them: `aggregation` enters each row of its METHODS."""

INPUTS = next(name for name, statistic in STATISTICS.items() if statistic.of_inputs)
"""The statistic that inputs are drawn from, for all who need inputs but know no statistic."""

__all__ = ["INPUTS", "NEEDED_BY", "STATISTICS", "Gatherer", "NotGathered", "Options", "Statistic"]
