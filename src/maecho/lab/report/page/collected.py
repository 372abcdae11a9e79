"""Finds the results in a folder and checks them, so that nothing after this module meets half of a file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maecho import schema
from maecho.errors import InputError
from maecho.lab import charts
from maecho.lab import experiment as configs
from maecho.lab.charts import Chart
from maecho.lab.experiment import Experiment
from maecho.lab.harness.results import FORMAT, read_results
from maecho.lab.studies.config import Study as Config


@dataclass(frozen=True)
class _Record:
    """What a page reads of one column of one run."""

    settings: str
    accuracy: float
    seconds: dict[str, float]
    device: str = ""
    trained_on: str = ""
    bytes: int | None = None
    recipe: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    trusted: dict[str, str | list[str]] = field(default_factory=dict)
    curve: list[tuple[int, float]] | None = None


@dataclass(frozen=True)
class _Run:
    """What a page reads of one run."""

    cell: dict[str, Any]
    seed: int
    columns: dict[str, _Record]
    partition: list[list[int]] = field(default_factory=list)
    weights_bytes: int | None = None


@dataclass(frozen=True)
class _StudyRun:
    """One run of a study, as its file has it."""

    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    charts: list[Any] = field(default_factory=list)
    seconds: Any = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    data: str = ""
    code: str = ""


@dataclass(frozen=True)
class _StudyFile:
    study: str
    title: str
    format: int
    quick: bool
    runs: list[_StudyRun]
    text: str = ""


@dataclass(frozen=True)
class Measured:
    """An experiment with its results."""

    experiment: Experiment
    results: Mapping[str, Any]

    @property
    def name(self) -> str:
        """A name that no other experiment of a page has."""
        return self.experiment.name + ("-quick" if self.experiment.quick else "")


@dataclass(frozen=True)
class StudyRun:
    """One run of a study, with its charts."""

    about: Mapping[str, Any]
    """Its seed, settings, seconds, device, versions, data and code."""
    numbers: Mapping[str, Any]
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Study:
    """An experiment that is no table of accuracies."""

    name: str
    title: str
    text: str
    quick: bool
    runs: tuple[StudyRun, ...]
    order: int = 100
    """Where its section is among those of the experiments."""


def collect(folder: Path) -> tuple[list[Measured], list[Study]]:
    """All results of a folder, in the order of their documents.

    Raises InputError, in one sentence, for a folder without results and for a file that holds something else.
    """
    if not folder.is_dir():
        raise InputError(f"--results must be a folder, got {'a file' if folder.exists() else 'nothing'} at {folder}")
    experiments, studies = [], []
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("."):
            continue
        found = _parse(path)
        if "study" in found:
            studies.append(_study(path, found))
        else:
            experiments.append(_measured(path, found))
    if not experiments and not studies:
        raise InputError(f"{folder} must hold results as `maecho reproduce` writes them, got none")
    experiments.sort(key=lambda one: (one.experiment.quick, one.experiment.document.order, one.name))
    studies.sort(key=lambda one: (one.quick, one.order, one.name))
    return experiments, studies


def _parse(path: Path) -> dict[str, Any]:
    try:
        found = schema.parse(path.read_bytes())
    except (ValueError, OSError) as error:
        raise InputError(f"{path} must hold results as JSON, got a text that is cut or damaged: {error}") from error
    if not isinstance(found, dict) or not ({"experiment", "study"} & found.keys()):
        raise InputError(f"{path} must hold results of an experiment or a study, got other JSON; move it away")
    return found


def _config(path: Path, name: object) -> Path | None:
    """The config of a file of results: in `experiments/`, or beside the results or their folder."""
    if not re.fullmatch(r"[\w.+-]+", str(name)):
        return None
    places = (configs.folder(), path.parent.parent, path.parent)
    return next((place / f"{name}.toml" for place in places if (place / f"{name}.toml").is_file()), None)


def _measured(path: Path, found: Mapping[str, Any]) -> Measured:
    name = found["experiment"]
    config = _config(path, name)
    if config is None:
        raise InputError(f"{path} must be results of a config of experiments/ or beside it, got those of {name!r}")
    experiment = Experiment.load(str(config), found.get("quick") is True)
    results = read_results(path, experiment)
    try:
        for run in results["runs"]:
            shown = schema.convert(run, _Run)
            finite = (number for one in shown.columns.values() for number in (one.accuracy, *one.seconds.values()))
            if not all(map(math.isfinite, finite)):
                raise ValueError("accuracies and seconds that are no numbers")
            if not all("merging" in one.seconds for one in shown.columns.values()):
                raise ValueError("a column without its seconds of merging")
            if any(count < 0 for row in shown.partition for count in row) or len({*map(len, shown.partition)}) > 1:
                raise ValueError("a partition that is no table of counts")
    except ValueError as error:
        raise InputError(f"{path} must hold whole runs of {experiment.name}, got: {error}") from error
    return Measured(experiment, results)


def _study(path: Path, found: Mapping[str, Any]) -> Study:
    try:
        file = schema.convert(found, _StudyFile)
        if file.format != FORMAT:
            raise ValueError(f"format {file.format} instead of {FORMAT}")
        runs = tuple(_study_run(run) for run in file.runs)
    except ValueError as error:
        raise InputError(f"{path} must hold whole runs of a study, got: {error}") from error
    config = _config(path, file.study)
    if config is None:
        return Study(path.stem, file.title, file.text, file.quick, runs)
    document = Config.load(str(config)).document
    return Study(path.stem, document.heading or file.title, file.text, file.quick, runs, document.order)


def _study_run(run: _StudyRun) -> StudyRun:
    about = {
        "seed": run.seed, **run.settings, "seconds": run.seconds, "device": run.device,
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "data": run.data, "code": run.code,
    }  # fmt: skip
    return StudyRun(about, run.numbers, tuple(charts.read(chart) for chart in run.charts))
