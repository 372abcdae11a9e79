"""A server that goes a part of the way only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maecho.options import number
from maecho.rounds.servers import Outcome, Round, Server, State, Weights
from maecho.rounds.training.local import Correction

SEEN = "classes seen"


@dataclass(frozen=True)
class Paced:
    """w ← w + pace · (what `server` makes − w).

    The clients of a round lack classes, and what is merged of them forgets these. With a small pace the model forgets
    slowly, and later rounds bring them back. A class that comes for the first time is taken in at once: in such a round
    the pace is 1.
    """

    server: Server
    pace: float = 0.3

    def __post_init__(self) -> None:
        number("pace", self.pace, "above 0 and at most 1", 1e-9, 1)

    def correction(self, weights: Weights, state: State, client: int) -> Correction:
        return self.server.correction(weights, state, client)

    def __call__(self, round_: Round, state: State) -> Outcome:
        outcome = self.server(round_, {name: t for name, t in state.items() if name != SEEN})
        seen = set(state[SEEN].tolist()) if SEEN in state else set()
        drawn = {label for one in round_.returned for label in one.y.unique().tolist()}
        pace = self.pace if drawn <= seen else 1.0
        kept = {**outcome.state, SEEN: torch.tensor(sorted(seen | drawn))}
        return Outcome(_between(round_.weights, outcome.weights, pace), kept, outcome.bytes)


def _between(old: Weights, new: Weights, pace: float) -> dict[str, Tensor]:
    """The point that far on the way. Counters are taken from the new weights."""
    if pace == 1:
        return dict(new)
    return {
        name: torch.lerp(old[name], tensor, pace) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }
