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

NEEDED_BY: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "fedavg": (frozenset(), frozenset()),
    "ma-echo": (frozenset({"projector"}), frozenset({"classes"})),
    "ma-echo+ot": (frozenset({"projector"}), frozenset({"classes"})),
    "ot": (frozenset(), frozenset()),
    "pfnm": (frozenset(), frozenset()),
    "fedma": (frozenset(), frozenset()),
    "regmean": (frozenset({"gram"}), frozenset()),
    "fisher": (frozenset({"fisher"}), frozenset()),
    "kronecker": (frozenset({"gram", "gradients"}), frozenset()),
    "afl": (frozenset({"gram", "targets"}), frozenset()),
    "dense": (frozenset({"moments"}), frozenset()),
    "echo-chain": (frozenset({"moments"}), frozenset({"features"})),
}
"""Name of a method -> the statistics that it needs with its default options, and those that it reads if they are there.
So a client need not load the methods. A test holds this to METHODS."""

INPUTS = next(name for name, statistic in STATISTICS.items() if statistic.of_inputs)
"""The statistic that inputs are drawn from, for all who need inputs but know no statistic."""

__all__ = ["INPUTS", "NEEDED_BY", "STATISTICS", "Gatherer", "NotGathered", "Options", "Statistic"]
