"""How far a relay has come: its stages, and of those that are fitted, from what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from maecho.network.units import Unit

REAL, DRAWN, START = "real", "drawn", "start"
"""What a stage was fitted to: the clients' data, drawn inputs, or nothing, being taken from a model merged before."""


@dataclass(frozen=True)
class FittedStage:
    """One finished stage, as the recipe of a merged model shows it."""

    layers: list[str]
    inputs: str
    """REAL, DRAWN or START."""
    clients: int = 0
    """How many answered; 0 unless real data were asked."""
    bytes: int = 0
    """The size of the largest answer; 0 unless real data were asked."""


@dataclass(frozen=True)
class RelayState:
    """All that a checkpoint holds beside the weights. It never changes: a fitted stage makes a new one."""

    stages: tuple[tuple[Unit, ...], ...]
    head: str | None
    """The last layer, whose rows are the classes, if there is one."""
    single_client: bool
    """Then its network is what is wanted, whatever the labels."""
    settled: frozenset[str]
    """Names of the weights that no stage will change any more."""
    fitted: tuple[FittedStage, ...] = ()

    @property
    def finished(self) -> int:
        """How many stages are fitted."""
        return len(self.fitted)

    @property
    def complete(self) -> bool:
        return self.finished == len(self.stages)

    @property
    def layers(self) -> list[list[str]]:
        """The layers of every stage."""
        return [[unit.name for unit in stage] for stage in self.stages]

    def after(self, stage: FittedStage, settled: Iterable[str]) -> RelayState:
        """With one more stage fitted, and these weights settled."""
        return replace(self, fitted=(*self.fitted, stage), settled=self.settled | frozenset(settled))
