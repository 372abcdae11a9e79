"""The state of a relay between two stages, and its checkpoint: a file from which another server can go on."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from maecho import schema
from maecho._version import __version__
from maecho.echo.messages import units_named
from maecho.errors import InputError
from maecho.linalg.finite import is_finite
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


@dataclass(frozen=True)
class _About:
    """The entries in the header of a checkpoint."""

    stages: tuple[tuple[str, ...], ...]
    joins: dict[str, str]
    head: str | None
    alone: bool
    finished: int
    settled: tuple[str, ...]
    heard: tuple[int, ...]
    bytes: tuple[int, ...]
    from_start: int = 0
    """Files of maecho 0.1.0 do not have it. Their stages from a start count as fitted to drawn inputs."""

    def __post_init__(self) -> None:
        layers = [layer for stage in self.stages for layer in stage]
        if len(set(layers)) < len(layers):
            raise ValueError("a layer in two stages")
        told = f"{self.finished} of {len(self.stages)} stages are finished, of {len(self.heard)} it tells"
        if not 0 <= self.from_start <= len(self.heard) == len(self.bytes) == self.finished <= len(self.stages):
            raise ValueError(f"{told}, {self.from_start} came from a start")
        if min((*self.heard, *self.bytes), default=0) < 0:
            raise ValueError("a negative number of clients or of bytes")

    def check_names(self, tensors: Container[str]) -> None:
        """Raise ValueError unless every name is that of a layer in a stage, or of a tensor in the file."""
        layers = {layer for stage in self.stages for layer in stage}
        for name in (*self.joins, *([] if self.head is None else [self.head])):
            if name not in layers:
                raise ValueError(f"{name!r}, which is a layer of no stage")
        for name in self.settled:
            if name not in tensors:
                raise ValueError(f"no tensor {name!r}")


def read_checkpoint(path: Path, units: Mapping[str, Unit]) -> tuple[RelayState, dict[str, Tensor]]:
    """Read the state and the final weights. Raises InputError unless they belong to a network with these units."""
    with files.opened(path, "relay") as file:
        try:
            about = schema.convert(file.about, _About)
            stages = tuple(
                units_named({name: about.joins.get(name) for name in stage}, units) for stage in about.stages
            )
            about.check_names(file.listing)
        except ValueError as error:
            raise not_of_this_network(path, error) from error
        held = file.read_all()
    tensors = {name: held[name] for name in about.settled}
    fitted = tuple(
        FittedStage(list(layers), START if k < about.from_start else REAL if clients else DRAWN, clients, size)
        for k, (layers, clients, size) in enumerate(zip(about.stages, about.heard, about.bytes, strict=False))
    )
    wrong = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not is_finite(tensor)]
    if wrong:
        raise not_of_this_network(path, ValueError(f"NaN or infinity in {wrong[0]!r}"))
    return RelayState(stages, about.head, about.alone, frozenset(about.settled), fitted), tensors


def not_of_this_network(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} must be the checkpoint of a relay of this network, got: {error}")
