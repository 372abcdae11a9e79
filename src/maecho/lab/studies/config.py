"""One config of `experiments/` with a study: which one, with which settings and seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from maecho import schema
from maecho.errors import InputError
from maecho.lab.data import DATASETS
from maecho.lab.experiment import Document, find, read
from maecho.lab.studies import STUDIES
from maecho.lab.studies.found import Question

KEYS = ("title", "study", "seeds", "settings", "document", "quick")
"""What a config may say."""
SHOWN = ("heading", "text", "order")
"""What its `document` may say."""


@dataclass(frozen=True)
class Study:
    """One config file."""

    name: str
    title: str
    seeds: tuple[int, ...]
    question: Question
    document: Document = dataclasses.field(default_factory=Document)
    quick: bool = False

    @classmethod
    def load(cls, name: str, quick: bool = False) -> Study:
        """Read a config by its name in `experiments/`, or by path. `quick`: the same on small data."""
        path = find(name)
        raw = read(path)
        try:
            return cls._of(path.stem, raw, quick)
        except KeyError as error:
            raise InputError(f"{path} must say {error}, got nothing of that name") from error
        except (TypeError, ValueError) as error:
            raise InputError(f"{path} must describe a study, got a mistake at {error}") from error

    @classmethod
    def _of(cls, name: str, raw: Mapping[str, Any], quick: bool) -> Study:
        _only("", raw, KEYS)
        changes = raw.get("quick", {})
        _only("quick: ", changes, ("seeds", "settings"))
        _only("document: ", raw.get("document", {}), SHOWN)
        if raw["study"] not in STUDIES:
            raise ValueError(f"study: must be one of {', '.join(STUDIES)}, got {raw['study']!r}")
        settings, seeds = raw.get("settings", {}), raw["seeds"]
        if quick:
            settings, seeds = settings | changes.get("settings", {}), changes.get("seeds", seeds)
        question = made(STUDIES[raw["study"]], settings)
        if question.data and question.data not in DATASETS:
            raise ValueError(f"settings: data must be among {', '.join(DATASETS)}, got {question.data!r}")
        if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise ValueError(f"seeds: must be a list of whole numbers, got {seeds!r}")
        if not isinstance(raw["title"], str):
            raise ValueError(f"title: must be a text, got {raw['title']!r}")
        return cls(name, raw["title"], tuple(seeds), question, Document(**raw.get("document", {})), quick)


def made(kind: type[Question], settings: Mapping[str, Any]) -> Question:
    """The study with these settings. Raises ValueError for what is misspelt or of a wrong type."""
    _check_keys("settings: ", kind, settings)
    try:
        return schema.convert(settings, kind)
    except ValueError as error:
        raise ValueError(f"settings: {error}") from error


def _check_keys(where: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    """Refuse keys that are no fields of this dataclass, or of one in it."""
    kinds = get_type_hints(kind)
    known = tuple(field.name for field in dataclasses.fields(kind))
    _only(where, given, known)
    for key, value in given.items():
        if isinstance(value, Mapping) and dataclasses.is_dataclass(kinds[key]):
            _check_keys(f"{where}{key}: ", kinds[key], value)


def _only(where: str, given: Any, known: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}must be a table, got {given!r}")
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{where}{unknown[0]!r}, known are {', '.join(known)}")
