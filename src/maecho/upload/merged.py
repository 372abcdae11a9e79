"""What every method gives: a state_dict that knows how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from maecho import schema
from maecho._version import __version__
from maecho.errors import UploadError
from maecho.upload import storage as files


class Merged(dict[str, Tensor]):
    """A state_dict that knows how it was made."""

    def __init__(
        self, weights: Mapping[str, Tensor], averaged: Iterable[str] = (), recipe: Mapping[str, Any] | None = None
    ):
        super().__init__(weights)
        self.averaged = tuple(averaged)
        """Names that were only averaged, nothing being known of them but their values: no input matrix, no inputs."""
        self.recipe = dict(recipe or {})
        """How it was made; see `make_recipe`."""
        self.widths: dict[str, int] = {}
        """Neurons of each space, where a method may have changed them; see `maecho.network.spaces.load`."""

    def save(self, path: str | Path) -> None:
        """One safetensors file that any tool can read, with the recipe in its header."""
        about = {"recipe": self.recipe, "averaged": list(self.averaged), "made_by": f"maecho {__version__}"}
        files.write_tensors(Path(path), "model", self, about)

    @classmethod
    def load(cls, path: str | Path) -> Merged:
        with files.opened(Path(path), "model") as file:
            try:
                about = schema.convert(file.about, _About)
            except ValueError as error:
                raise UploadError(f"{path} must be a maecho model, got one whose header says: {error}") from error
            return cls(file.read_all(), about.averaged, about.recipe)


@dataclass(frozen=True)
class _About:
    """What the file of a merged model says of it."""

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
    """How a model was merged. Every merged model has these entries, whatever made it.

    Args:
        method: its name.
        options: its hyper-parameters, for people.
        clients: how many were merged; in many rounds, how many there were at once at most.
        seconds: how long it took.
        rounds: one entry a stage where the network was fitted stage by stage: its `layers`, its `inputs` ("real",
            "drawn", or "start" where it was taken from a model merged before), how many `clients` answered, and the
            `bytes` of the largest answer.
        upload_bytes: the size of the largest upload, as far as the method reads it. 0 if none was read.
        privacy: what the answers to all rounds promise together. Empty without a promise.
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
