"""Decides at which stages a relay asks clients for sums over real data. At all others inputs are drawn from uploads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maecho.errors import InputError
from maecho.network.units import Unit

Rounds = int | str | Sequence[str]
"""What a user may ask for: "all", a number of rounds, or names of layers."""
Stages = Sequence[Sequence[Unit]]


def checked(rounds: Rounds, units: Mapping[str, Unit]) -> int | str | tuple[str, ...]:
    """Raise InputError unless these are rounds of a network with these units."""
    if rounds == "all" or (isinstance(rounds, int) and not isinstance(rounds, bool) and rounds >= 1):
        return rounds
    if isinstance(rounds, str) or not isinstance(rounds, Iterable) or not rounds:
        raise InputError(f"rounds must be all, a whole number from 1 on, or names of layers, got {rounds!r}")
    for name in rounds:
        if name not in units:
            raise InputError(f"rounds must name layers of the network ({', '.join(units)}), got {name!r}")
    return tuple(rounds)


def check_used(rounds: Rounds, *, uploads: Any = None, start: Any = None, drawing: Any = None) -> None:
    """Raise InputError if an argument has no use, or if inputs must be drawn and there are no uploads.

    `uploads`, `start` and `drawing` are for drawn inputs alone.
    """
    if start is not None and (uploads is None or rounds == "all"):
        raise InputError(
            "start must come with uploads, which tell how the network runs, and with rounds at some layers alone, "
            f"got rounds={rounds!r}"
        )
    for name, given in {"uploads": uploads, "drawing": drawing}.items():
        if given is not None and rounds == "all":
            raise InputError(f"{name} must be left out with rounds='all', where no inputs are drawn, got some")
    if uploads is None and rounds != "all":
        raise InputError(f"rounds={rounds!r} needs uploads with moments to draw inputs from, got none")


def check_run(rounds: Rounds, stages: Stages) -> None:
    """Raise InputError unless the layers that `rounds` names run."""
    if isinstance(rounds, int | str):
        return
    run = {name for stage in stages for unit in stage for name in (unit.name, unit.norm)}
    for name in rounds:
        if name not in run:
            raise InputError(f"rounds must name layers that run, got {name!r}, which never does")


def asks_clients(rounds: Rounds, stages: Stages, stage: int) -> bool:
    """Whether a stage is fitted to real data. A number of rounds counts stages from the head backwards. The upload
    counts as the first round."""
    if isinstance(rounds, int):
        return stage >= len(stages) - (rounds - 1)
    if isinstance(rounds, str):
        return True  # "all"
    return any({unit.name, unit.norm} & set(rounds) for unit in stages[stage])
