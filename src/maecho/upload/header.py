"""The header of an upload's file: its fields with their types, and checks that they fit the listed tensors.

All checks run before a tensor is read. An Upload that is made in memory passes the same checks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from maecho import names, schema
from maecho._version import __version__
from maecho.errors import InputError, UploadError
from maecho.network import spaces as network_spaces
from maecho.network.layers import Layer
from maecho.network.packed.storage import Stored, complaint
from maecho.network.spaces import Space
from maecho.statistics.statistic import Statistic
from maecho.upload import version_1
from maecho.upload.envelope import Entry
from maecho.upload.storage import File

LARGEST = 2**53
"""The largest whole number. Float64 is exact up to here, and the sum of two fits into 64 bits."""
WHOLE = 2**18
"""The most whole numbers that the statistics of a file may hold. They are counts and labels, which Python reads one by
one: each takes ten times its size in memory, and a Gaussian with a count takes 50 µs."""
RECIPE = 2**18
"""The most characters of a recipe's JSON."""
_AXES = 8
_check_name = functools.partial(names.check, error=UploadError)


@dataclass(frozen=True)
class Header:
    """All that a file says about an upload, beside its tensors."""

    client: str
    examples: int
    fingerprint: str | None
    """None for a file of format 1, which computed it in another way."""
    statistics: dict[str, dict[str, dict[str, tuple[int, ...]]]]
    """Statistic -> entry (a layer, a weight) -> its public facts: name -> shape."""
    layers: tuple[Layer, ...]
    head: str | None
    aliases: dict[str, str]
    spaces: tuple[Space, ...] | None
    recipe: dict[str, Any]
    stored: tuple[Stored, ...] = ()
    """Files of models without packed or computed weights do not have it."""
    made_by: str = field(default=f"maecho {__version__}")
    digest: str = ""
    """The digest of the header in the file that it was read from. It is not written."""

    def __post_init__(self) -> None:
        check_client(self.client, self.examples)
        check_recipe(self.client, self.recipe)
        for name, entries in self.statistics.items():
            for shape in (shape for facts in entries.values() for shape in facts.values()):
                _check_shape(f"{self.client}: {name}", shape)
        _check_name(f"{self.client}: made_by", self.made_by)

    def about(self) -> dict[str, Any]:
        """The header in the form that a file holds."""
        left_out = {"digest"} if self.stored else {"digest", "stored"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def read(file: File, known: Mapping[str, Statistic]) -> Header:
    """Read and check the header of an open file. `known` are all statistics by name."""
    try:
        about = version_1.as_today(file) if file.version == 1 else file.about
        header = schema.convert(about, Header)
    except UploadError:
        raise
    except ValueError as error:
        raise UploadError(f"{file.path} must be a maecho upload, got one whose header says: {error}") from error
    try:
        _check_statistics(header, file.listing, known)
        weights = listed_weights(file)
        check_architecture(header.client, weights, header.layers, header.head, header.aliases, header.stored)
        check_spaces(header.client, weights, header.spaces)
    except UploadError as error:
        raise UploadError(f"{file.path}: {error}") from error
    found = fingerprint(weights, header.layers, header.head, header.aliases, header.stored)
    if header.fingerprint not in (None, found):
        raise UploadError(
            f"{file.path}: {header.client}'s weights must have the fingerprint {header.fingerprint} that the file "
            f"states, got {found}"
        )
    return replace(header, fingerprint=found, digest=file.digest)


def listed_weights(file: File) -> dict[str, Tensor]:
    """The weights that a file lists, as tensors without values."""
    return {name.removeprefix("weights/"): tensor for name, tensor in sorted(_listed("weights", file.listing).items())}


def fingerprint(
    weights: Mapping[str, Tensor],
    layers: Iterable[Layer],
    head: str | None,
    aliases: Mapping[str, str],
    stored: Iterable[Stored] = (),
) -> str:
    """Equal for equal architectures: names, shapes and dtypes of the weights, and how they are read as matrices."""
    text = json.dumps(architecture(weights, layers, head, aliases, stored), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def architecture(
    weights: Mapping[str, Tensor],
    layers: Iterable[Layer],
    head: str | None,
    aliases: Mapping[str, str],
    stored: Iterable[Stored] = (),
) -> dict[str, Any]:
    """All that the fingerprint is computed from. Without stored tensors it is what it was before there were any."""
    packed = {one.name: asdict(one) for one in stored}
    found = {
        "weights": {name: described(tensor.dtype, tensor.shape) for name, tensor in weights.items()},
        "layers": {layer.name: asdict(layer) for layer in layers},
        "head": head,
        "aliases": dict(aliases),
    }
    return {**found, "stored": packed} if packed else found


def described(dtype: torch.dtype, shape: Sequence[int]) -> list[Any]:
    """A dtype and a shape as JSON."""
    return [str(dtype).removeprefix("torch."), *shape]


def check_client(client: object, examples: object) -> None:
    """Raise UploadError unless the name and the number of examples can be a client's."""
    _check_name("a client", client, names.CLIENT)
    if isinstance(examples, bool) or not isinstance(examples, int) or not 1 <= examples <= LARGEST:
        raise UploadError(f"{client}: the number of examples must be at least 1 and at most 2**53, got {examples!r}")


def check_recipe(client: str, recipe: Mapping[str, Any]) -> None:
    """Raise UploadError unless the recipe is JSON and small. What it says is free, since only people read it."""
    try:
        text = json.dumps(dict(recipe), allow_nan=False)
        schema.parse(text.encode())
    except (TypeError, ValueError) as error:
        raise UploadError(f"{client}: the recipe must be JSON, got {error}") from error
    if len(text) > RECIPE:
        raise UploadError(f"{client}: the recipe must have at most {RECIPE} characters, got {len(text)}")


def not_sent(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The statistics that were not sent: name -> reason. Empty if the recipe does not list them as `make_upload`
    does."""
    reasons = recipe.get("not_sent")
    return {str(what): str(why) for what, why in reasons.items()} if isinstance(reasons, Mapping) else {}


def check_architecture(
    client: str,
    weights: Mapping[str, Tensor],
    layers: Sequence[Layer],
    head: str | None,
    aliases: Mapping[str, str],
    stored: Sequence[Stored] = (),
) -> None:
    """Raise UploadError unless weights, layers, tied names and head fit together. Values are not read, so the weights
    may be tensors on the device "meta"."""
    if not weights:
        raise UploadError(f"{client}: an upload must carry weights, got none")
    for name in weights:
        _check_name(f"{client}: a weight", name)
    for alias, kept in aliases.items():
        _check_name(f"{client}: a tied weight", alias)
        if kept not in weights:
            raise UploadError(f"{client}: {alias!r} must be tied to a weight, got {kept!r}, which is not there")
        if alias in weights:
            raise UploadError(f"{client}: {alias!r} must be a weight or tied to one, got both")
    for one in stored:
        _check_name(f"{client}: a stored tensor", one.name)
    wrong = complaint(stored, weights, aliases)
    if wrong:
        raise UploadError(f"{client}: {wrong}")
    for part, what in (("name", "layer"), ("weight", "weight")):
        seen: set[str] = set()
        for layer in layers:
            value = getattr(layer, part)
            if value in seen:
                raise UploadError(f"{client}: layers must have one {what} each, got {value!r} twice")
            seen.add(value)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    for layer in layers:
        _check_layer(client, layer, weights, shapes)
    if head is not None and head not in {layer.name for layer in layers}:
        raise UploadError(f"{client}: the head must be one of its layers, got {head!r}")


def check_spaces(client: str, weights: Mapping[str, Tensor], spaces: Iterable[Space] | None) -> None:
    """Raise UploadError unless the neuron spaces fit the weights, which may be tensors on the device "meta"."""
    for space in spaces or ():
        _check_name(f"{client}: a neuron space", space.name, empty=True)
        for number in (space.size, *(place.block for place in space.places)):
            if not 1 <= number <= LARGEST:
                raise UploadError(
                    f"{client}: sizes and blocks of the neuron space {space.name!r} must be positive, got {number}"
                )
    try:
        network_spaces.check(tuple(spaces or ()), weights)
    except InputError as error:
        raise UploadError(f"{client}: {error}") from error


def _check_layer(client: str, layer: Layer, weights: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    _check_name(f"{client}: a layer", layer.name, empty=True)
    for part in (layer.weight, layer.bias):
        if part is not None and part in weights and not weights[part].is_floating_point():
            raise UploadError(
                f"{client}: {part!r} must be of floating point, since it belongs to a layer, got {weights[part].dtype}"
            )
        if part is not None and part in weights and 0 in weights[part].shape:
            shape = tuple(weights[part].shape)
            raise UploadError(
                f"{client}: {part!r} must have no axis of length 0, since it belongs to a layer, got {shape}"
            )
    wrong = layer.complaint(shapes)
    if wrong:
        raise UploadError(f"{client}: {wrong}")


def _check_shape(what: str, shape: tuple[int, ...]) -> None:
    if len(shape) > _AXES or min(shape, default=1) < 1 or math.prod(shape) > LARGEST:
        raise UploadError(f"{what} must have a shape of positive numbers, got {list(shape[: _AXES + 1])}")


def _check_statistics(header: Header, listing: Mapping[str, Entry], known: Mapping[str, Statistic]) -> None:
    """Raise UploadError unless every tensor is read as part of the weights or of a statistic that the header lists.

    So no tensor can travel in a file unseen, since `inspect` shows what was read.
    """
    client, stated = header.client, header.statistics.keys()
    if not stated <= known.keys():
        raise UploadError(f"{client}: statistics must be among {', '.join(known)}, got {list(stated)}")
    listed = {name.split("/")[0] for name in listing}
    for part in sorted(listed - stated - {"weights"}):
        raise UploadError(f"{client}: tensors of {part!r} must be of a listed statistic, got one that is not")
    for name in stated - listed if header.layers else ():
        raise UploadError(f"{client}: {name} must be there as the header says, got none")
    if "weights" in listing:
        raise UploadError(f"{client}: a tensor of the weights must be named weights/<name>, got 'weights'")
    found = {name: _listed(name, listing) for name in stated}
    whole = sum(t.numel() for one in found.values() for t in one.values() if not t.is_floating_point())
    if whole > WHOLE:
        raise UploadError(f"{client}: statistics must hold at most {WHOLE} whole numbers, got {whole}")
    for name, entries in header.statistics.items():
        try:
            parts = known[name].split(found[name])
        except ValueError as error:
            raise UploadError(f"{client}: {error}") from error
        wrong = known[name].complaint(parts)
        if wrong:
            raise UploadError(f"{client}: {wrong}")
        for entry in sorted(entries.keys() - parts.keys()):
            raise UploadError(f"{client}: {name} must have the entry {entry!r} as the header says, got none")


def _listed(part: str, listing: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors of the weights or of a statistic that a file lists, without values."""
    return {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in listing.items()
        if name == part or name.startswith(f"{part}/")
    }
