"""The state of a relay between two stages, and its checkpoint: a file from which another server can go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from maecho._version import __version__
from maecho.echo.messages import units_named
from maecho.errors import UploadError
from maecho.network.units import Unit
from maecho.upload import storage as files

REAL, DRAWN, START = "real", "drawn", "start"
"""What a stage was fitted to: the clients' data, or drawn inputs. START: it was taken from a model merged before."""


@dataclass(frozen=True)
class FittedStage:
    """One finished stage, as the recipe of a merged model shows it."""

    layers: list[str]
    inputs: str
    """REAL, DRAWN or START."""
    clients: int = 0
    """How many clients answered. 0 unless real data were asked."""
    bytes: int = 0
    """The size of the largest answer. 0 unless real data were asked."""


@dataclass(frozen=True)
class RelayState:
    """Everything in a checkpoint but the weights. It never changes: every fitted stage makes a new one."""

    stages: tuple[tuple[Unit, ...], ...]
    head: str | None
    """The last layer if its rows are the classes, else None."""
    single_client: bool
    """Whether there is only one client. Then its own network is the right result, whatever the labels are."""
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
        """The state after one more stage was fitted, which made these weights final."""
        return replace(self, fitted=(*self.fitted, stage), settled=self.settled | frozenset(settled))


def write_checkpoint(path: Path, state: RelayState, weights: Mapping[str, Tensor]) -> None:
    """Write everything that `read_checkpoint` needs. At any moment the file on disk is whole."""
    about = {
        "stages": state.layers,
        "joins": {u.name: u.norm for stage in state.stages for u in stage if u.norm is not None},
        "head": state.head,
        "alone": state.single_client,
        "finished": state.finished,
        "from_start": sum(stage.inputs == START for stage in state.fitted),
        "settled": sorted(state.settled),
        "heard": [stage.clients for stage in state.fitted],
        "bytes": [stage.bytes for stage in state.fitted],
        "made_by": f"maecho {__version__}",
    }
    files.write_tensors(path, "relay", weights, about)


def read_checkpoint(path: Path, units: Mapping[str, Unit]) -> tuple[RelayState, dict[str, Tensor]]:
    """Read the state and the final weights. Raises UploadError unless they belong to a network with these units.

    Files of maecho 0.1.0 do not say which stages came from a start. Such stages count as fitted to drawn inputs.
    """
    about = files.read_about(path, "relay")
    tensors = files.read_tensors(path)
    try:
        joins = dict(about["joins"])
        stages = tuple(units_named({name: joins.get(name) for name in stage}, units) for stage in about["stages"])
        from_start = int(about.get("from_start", 0))
        answered = list(zip(about["heard"], about["bytes"], strict=True))
        if not from_start <= len(answered) == about["finished"] <= len(stages):
            raise ValueError(f"{about['finished']} of {len(stages)} stages are finished, of {len(answered)} it tells")
        fitted = tuple(
            FittedStage(
                [unit.name for unit in stages[k]],
                START if k < from_start else REAL if clients else DRAWN,
                int(clients),
                int(size),
            )
            for k, (clients, size) in enumerate(answered)
        )
        settled = frozenset(about["settled"])
        state = RelayState(stages, about["head"], bool(about["alone"]), settled, fitted)
        return state, {name: tensors[name] for name in about["settled"]}
    except (KeyError, TypeError, ValueError) as error:
        raise not_of_this_network(path, error) from error


def not_of_this_network(path: Path, error: Exception) -> UploadError:
    return UploadError(f"{path} must be the checkpoint of a relay of this network, got: {error}")
