"""The file that a run goes on from: the global model, the server's state and the record of every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from maecho.errors import InputError
from maecho.rounds.history import RoundRecord
from maecho.upload import storage

KIND = "rounds"


def write_checkpoint(path: Path, identity: str, weights: Any, state: Any, records: Sequence[RoundRecord]) -> None:
    """Write the file whole: a run that is killed meanwhile leaves the file of the round before."""
    tensors = {f"model/{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"state/{name}": tensor for name, tensor in state.items()}
    storage.write_tensors(path, KIND, tensors, {"identity": identity, "records": [_written(r) for r in records]})


def read_checkpoint(path: Path, identity: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[RoundRecord]]:
    """The global model, the server's state, and the records.

    Raises InputError if the file is of another run.
    """
    about = storage.read_about(path, KIND)
    if about.get("identity") != identity:
        raise InputError(
            f"{path} must be a checkpoint of these settings, this network and these clients, got one of others; name "
            "another file, or remove it"
        )
    tensors = storage.read_tensors(path)
    weights, state = (
        {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        for prefix in ("model/", "state/")
    )
    return weights, state, [_read(one) for one in about["records"]]


def _written(record: RoundRecord) -> dict[str, Any]:
    return {**asdict(record), "left_out": {str(client): why for client, why in record.left_out.items()}}


def _read(one: dict[str, Any]) -> RoundRecord:
    left_out = {int(client): why for client, why in one["left_out"].items()}
    return RoundRecord(**{**one, "sampled": tuple(one["sampled"]), "left_out": left_out})
