"""The ladder from echo-chain to echo-relay: what each further round at real data brought, and what it cost.

Read from the results that are committed beside the configs; nothing is run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from maecho.lab.experiment import Experiment, folder, summarise

EXPERIMENTS = ("echo-bytes", "echo-cifar")
"""The configs whose columns have rungs."""


@dataclass(frozen=True)
class Rung:
    """One column of a table."""

    name: str
    rounds: int | str
    asked: str
    """At which layers data are asked."""
    bytes: float
    """What a client uploads in all rounds."""
    accuracies: tuple[float | None, ...]
    """In per cent, cell by cell; None where it was not measured."""


@dataclass(frozen=True)
class Ladder:
    """All rungs of one experiment, as its config orders them."""

    title: str
    weights: int
    """Bytes of the weights."""
    cells: tuple[str, ...]
    rungs: tuple[Rung, ...]


def ladders() -> list[Ladder]:
    """One for every experiment of which there are results with bytes."""
    found = []
    for name in EXPERIMENTS:
        path = folder() / "results" / f"{name}.json"
        if path.is_file():
            one = ladder(Experiment.load(name), json.loads(path.read_text(encoding="utf-8")))
            found += [one] if one.rungs and one.weights else []
    return found


def ladder(experiment: Experiment, results: dict[str, list[dict[str, int]]]) -> Ladder:
    table = summarise(experiment, results)
    rungs = []
    for column, options in experiment.methods.items():
        if options["method"] not in ("echo-chain", "echo-relay"):
            continue
        figures = [figures.get(column) for _, figures in table]
        figures = [figure if figure is not None and figure.current else None for figure in figures]
        sizes = [figure.bytes for figure in figures if figure is not None and figure.bytes is not None]
        if not sizes:
            continue
        rounds = 1 if options["method"] == "echo-chain" else options.get("rounds", "all")
        asked = _asked(rounds)
        accuracies = tuple(None if figure is None else figure.mean for figure in figures)
        number = len(rounds) + 1 if isinstance(rounds, list) else rounds
        rungs.append(Rung(column, number, asked, max(sizes), accuracies))
    return Ladder(
        experiment.title,
        max((run["weights_bytes"] for run in results["runs"] if "weights_bytes" in run), default=0),
        tuple(f"{cell['clients']} clients, beta {cell['beta']}, {cell.get('init', 'same')} init" for cell, _ in table),
        tuple(rungs),
    )


def _asked(rounds: int | str | list[str]) -> str:
    if isinstance(rounds, int):
        return {1: "nowhere", 2: "at the head"}.get(rounds, f"at the last {rounds - 1} layers")
    return "at every layer" if rounds == "all" else f"at {', '.join(rounds)}"


def markdown(one: Ladder) -> str:
    """For a document."""
    heads = ("rounds", "real data asked", "a client uploads", "times the weights", *one.cells)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for rung in one.rungs:
        accuracies = ["" if accuracy is None else f"{accuracy:.1f}" for accuracy in rung.accuracies]
        size = (f"{rung.bytes / 1e6:.1f} MB", f"{rung.bytes / one.weights:.1f}")
        lines.append("| " + " | ".join([str(rung.rounds), rung.asked, *size, *accuracies]) + " |")
    return "\n".join(lines)
