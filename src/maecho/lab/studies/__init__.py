"""Experiments that are no table of accuracies, each a frozen dataclass of settings; STUDIES has them by name."""

from __future__ import annotations

from maecho.lab.studies.found import Question
from maecho.lab.studies.partitions import Partitions

STUDIES: dict[str, type[Question]] = {
    "partitions": Partitions,
}
"""The word that a config has for each study."""
