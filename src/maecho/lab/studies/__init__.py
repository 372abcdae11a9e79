"""Experiments that are no table of accuracies, each a frozen dataclass of settings; STUDIES has them by name."""

from __future__ import annotations

from maecho.lab.studies.convergence import Convergence
from maecho.lab.studies.directions import Directions
from maecho.lab.studies.found import Question
from maecho.lab.studies.generation import Generation
from maecho.lab.studies.many_rounds import ManyRounds
from maecho.lab.studies.neurons import Neurons
from maecho.lab.studies.partitions import Partitions
from maecho.lab.studies.penalty import Penalty
from maecho.lab.studies.surface import LossSurface

STUDIES: dict[str, type[Question]] = {
    "partitions": Partitions,
    "generation": Generation,
    "neurons": Neurons,
    "penalty": Penalty,
    "loss-surface": LossSurface,
    "directions": Directions,
    "convergence": Convergence,
    "many-rounds": ManyRounds,
}
"""The word that a config has for each study."""
