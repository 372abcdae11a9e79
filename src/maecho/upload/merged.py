"""The result of every method: a state_dict with a recipe that says how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from maecho import schema
from maecho._version import __version__
from maecho.errors import InputError
from maecho.upload import storage as files


class Merged(dict[str, Tensor]):
    """A state_dict with a recipe that says how it was made."""

    def __init__(
        self, weights: Mapping[str, Tensor], averaged: Iterable[str] = (), recipe: Mapping[str, Any] | None = None
    ):
        super().__init__(weights)
        self.averaged = tuple(averaged)
        """Names of the weights that were only averaged, since nothing is known about their inputs."""
        self.recipe = dict(recipe or {})
        """How it was made; see `make_recipe`."""
        self.widths: dict[str, int] = {}
        """Space -> its number of neurons, for methods that may change it; see `maecho.network.spaces.load`."""

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, which any tool can read, with the recipe in its header."""
        about = {"recipe": self.recipe, "averaged": list(self.averaged), "made_by": f"maecho {__version__}"}
        files.write_tensors(Path(path), "model", self, about)

    @classmethod
    def load(cls, path: str | Path) -> Merged:
        """Read a file. Raises InputError unless it is a merged model."""
        with files.opened(Path(path), "model") as file:
            try:
                about = schema.convert(file.about, _About)
            except ValueError as error:
                raise InputError(f"{path} must be a maecho model, got one whose header says: {error}") from error
            return cls(file.read_all(), about.averaged, about.recipe)


@dataclass(frozen=True)
class _About:
    """The fields in the header of a merged model's file."""

    averaged: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)


def make_recipe(
    method: str,
    options: str,
    clients: int,
    seconds: float,
    *,
    rounds: Sequence[Mapping[str, Any]] = (),
    upload_bytes: int = 0,
    privacy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the recipe of a merged model. It has these entries for every method.

    Args:
        method: the name of the method.
        options: its hyper-parameters, as text for people.
        clients: how many clients were merged. Over many rounds, the largest number in one round.
        seconds: how long it took.
        rounds: one entry for each stage, if the network was fitted stage by stage: its `layers`, its `inputs` ("real",
            "drawn", or "start" if the stage was taken from a model merged before), how many `clients` answered, and the
            `bytes` of the largest answer.
        upload_bytes: the size of the largest upload, counting only the parts that the method reads. 0 if there were no
            uploads.
        privacy: the promise for the answers to all rounds together. Empty without a promise.
    """
    return {
        "method": method,
        "options": options,
        "clients": clients,
        "seconds": round(float(seconds), 3),
        "rounds": [dict(entry) for entry in rounds],
        "upload_bytes": upload_bytes,
        "privacy": dict(privacy or {}),
        "made_by": f"maecho {__version__}",
    }
