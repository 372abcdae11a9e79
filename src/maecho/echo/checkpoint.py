"""The file that a relay server leaves after every stage, and from which another goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from maecho._version import __version__
from maecho.echo.messages import units_named
from maecho.echo.state import DRAWN, REAL, START, FittedStage, RelayState
from maecho.errors import UploadError
from maecho.network.units import Unit
from maecho.upload import storage as files


def write(path: Path, state: RelayState, weights: Mapping[str, Tensor]) -> None:
    """Write all that `read` needs; the file is whole at any moment."""
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


def read(path: Path, units: Mapping[str, Unit]) -> tuple[RelayState, dict[str, Tensor]]:
    """The state, and the weights that are settled. Raises UploadError unless they are of a network with these units.

    Files of maecho 0.1.0 do not say which stages came from a start; they are taken to be fitted to drawn inputs.
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
