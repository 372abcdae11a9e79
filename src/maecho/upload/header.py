"""What the header of an upload's file says, with types, and whether it fits the tensors that the file lists.

All of it is judged before a tensor is read: who sent it, of how many examples, how weights are read as matrices. The
same checks hold for an Upload that is made in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from maecho import names, schema
from maecho._version import __version__
from maecho.errors import InputError, UploadError
from maecho.network import spaces as network_spaces
from maecho.network.layers import Layer
from maecho.network.spaces import Space
from maecho.upload import version_1
from maecho.upload.storage import File

LARGEST = 2**53
"""Of a whole number: up to here float64 holds them all, and sums of two fit into 64 bits."""
RECIPE = 2**18
"""Characters of the JSON of a recipe."""
_AXES = 8


@dataclass(frozen=True)
class Header:
    """All that a file says of an upload, beside its tensors."""

    client: str
    examples: int
    fingerprint: str
    statistics: tuple[str, ...]
    layers: tuple[Layer, ...]
    head: str | None
    aliases: dict[str, str]
    spaces: tuple[Space, ...] | None
    input_shape: tuple[int, ...] | None
    recipe: dict[str, Any]
    made_by: str = field(default=f"maecho {__version__}")

    def __post_init__(self) -> None:
        check_client(self.client, self.examples)
        check_recipe(self.client, self.recipe)
        if self.input_shape is not None:
            _check_input_shape(self.client, self.input_shape)
        names.check(f"{self.client}: made_by", self.made_by)

    def about(self) -> dict[str, Any]:
        """As a file says it."""
        return asdict(self)


def read(file: File, known: Collection[str]) -> Header:
    """The header of an open file. `known` are the statistics that there are."""
    about = version_1.as_today(file) if file.version == 1 else file.about
    try:
        header = schema.convert(about, Header)
    except ValueError as error:
        raise UploadError(f"{file.path} must be a maecho upload, got one whose header says: {error}") from error
    try:
        _check_statistics(header, file.listing, known)
        weights = listed_weights(file)
        check_architecture(header.client, weights, header.layers, header.head, header.aliases)
        check_spaces(header.client, weights, header.spaces)
    except UploadError as error:
        raise UploadError(f"{file.path}: {error}") from error
    found = fingerprint(weights, header.layers, header.head, header.aliases)
    if header.fingerprint != found:
        raise UploadError(
            f"{file.path}: {header.client}'s weights must be of the architecture {header.fingerprint} that the file "
            f"names, got {found}"
        )
    return header


def listed_weights(file: File) -> dict[str, Tensor]:
    """The weights that a file lists, as tensors without values."""
    return {
        name.removeprefix("weights/"): torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in file.listing.items()
        if name.startswith("weights/")
    }


def fingerprint(
    weights: Mapping[str, Tensor], layers: Iterable[Layer], head: str | None, aliases: Mapping[str, str]
) -> str:
    """Equal for equal architectures: names, shapes and dtypes of the weights, and how they are read as matrices."""
    text = json.dumps(architecture(weights, layers, head, aliases), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def architecture(
    weights: Mapping[str, Tensor], layers: Iterable[Layer], head: str | None, aliases: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "weights": {name: described(tensor.dtype, tensor.shape) for name, tensor in weights.items()},
        "layers": {layer.name: asdict(layer) for layer in layers},
        "head": head,
        "aliases": dict(aliases),
    }


def described(dtype: torch.dtype, shape: Sequence[int]) -> list[Any]:
    return [str(dtype).removeprefix("torch."), *shape]


def check_client(client: object, examples: object) -> None:
    names.check("a client", client, names.CLIENT)
    if isinstance(examples, bool) or not isinstance(examples, int) or not 1 <= examples <= LARGEST:
        raise UploadError(f"{client}: the number of examples must be at least 1 and at most 2**53, got {examples!r}")


def check_recipe(client: str, recipe: Mapping[str, Any]) -> None:
    """A recipe is free text for people: any JSON, as long as it is small."""
    try:
        text = json.dumps(dict(recipe), allow_nan=False)
        schema.parse(text.encode())
    except (TypeError, ValueError) as error:
        raise UploadError(f"{client}: the recipe must be JSON, got {error}") from error
    if len(text) > RECIPE:
        raise UploadError(f"{client}: the recipe must have at most {RECIPE} characters, got {len(text)}")


def not_sent(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Why statistics are not there, by their names, as far as the recipe says so in the form of `make_upload`."""
    said = recipe.get("not_sent")
    return {str(what): str(why) for what, why in said.items()} if isinstance(said, Mapping) else {}


def check_architecture(
    client: str, weights: Mapping[str, Tensor], layers: Sequence[Layer], head: str | None, aliases: Mapping[str, str]
) -> None:
    """Weights with names, layers that can be read from them as matrices, ties and a head that exist. Values are not
    looked at: the weights may be tensors on the device "meta"."""
    if not weights:
        raise UploadError(f"{client}: an upload must carry weights, got none")
    for name in weights:
        names.check(f"{client}: a weight", name)
    for alias, kept in aliases.items():
        names.check(f"{client}: a tied weight", alias)
        if kept not in weights:
            raise UploadError(f"{client}: {alias!r} must be tied to a weight, got {kept!r}, which is not there")
        if alias in weights:
            raise UploadError(f"{client}: {alias!r} must be a weight or tied to one, got both")
    for part, what in (("name", "layer"), ("weight", "weight")):
        seen: set[str] = set()
        for layer in layers:
            value = getattr(layer, part)
            if value in seen:
                raise UploadError(f"{client}: layers must have one {what} each, got {value!r} twice")
            seen.add(value)
    for layer in layers:
        _check_layer(client, layer, weights)
    if head is not None and head not in {layer.name for layer in layers}:
        raise UploadError(f"{client}: the head must be one of its layers, got {head!r}")


def check_spaces(client: str, weights: Mapping[str, Tensor], spaces: Iterable[Space] | None) -> None:
    """Neuron spaces that lie on axes of the weights; these may be tensors on the device "meta"."""
    for space in spaces or ():
        names.check(f"{client}: a neuron space", space.name, empty=True)
        for number in (space.size, *(place.block for place in space.places)):
            if not 1 <= number <= LARGEST:
                raise UploadError(
                    f"{client}: sizes and blocks of the neuron space {space.name!r} must be positive, got {number}"
                )
    try:
        network_spaces.check(tuple(spaces or ()), weights)
    except InputError as error:
        raise UploadError(f"{client}: {error}") from error


def _check_layer(client: str, layer: Layer, weights: Mapping[str, Tensor]) -> None:
    names.check(f"{client}: a layer", layer.name, empty=True)
    for part, axes in ((layer.weight, 2), (layer.bias, 1)):
        if part is None:
            continue
        if part not in weights:
            raise UploadError(f"{client}: layer {layer.name!r} must have its weight {part!r}, got none")
        shape = tuple(weights[part].shape)
        if len(shape) < axes:
            raise UploadError(f"{client}: {part!r} must have at least {axes} axes to be read as a matrix, got {shape}")
        if not weights[part].is_floating_point():
            raise UploadError(
                f"{client}: {part!r} must be of floating point, being of a layer, got {weights[part].dtype}"
            )
        if 0 in shape:
            raise UploadError(f"{client}: {part!r} must have no axis of length 0, being of a layer, got {shape}")
    shape = tuple(weights[layer.weight].shape)
    axis = 1 if layer.transposed else 0
    if layer.groups < 1 or shape[axis] % layer.groups:
        raise UploadError(
            f"{client}: layer {layer.name!r} must have groups that divide its {shape[axis]} outputs, got "
            f"{layer.groups!r}"
        )
    if layer.transposed and (layer.groups > 1 or len(shape) > 2):
        raise UploadError(
            f"{client}: layer {layer.name!r} must be one matrix, being transposed, got {shape} in {layer.groups} groups"
        )
    if layer.bias is not None and tuple(weights[layer.bias].shape) != (shape[axis],):
        raise UploadError(
            f"{client}: {layer.bias!r} must be ({shape[axis]},), one number an output of layer {layer.name!r}, got "
            f"{tuple(weights[layer.bias].shape)}"
        )


def _check_input_shape(client: str, shape: tuple[int, ...]) -> None:
    if len(shape) > _AXES or min(shape, default=1) < 1 or math.prod(shape) > LARGEST:
        raise UploadError(f"{client}: inputs must have a shape of positive numbers, got {list(shape[: _AXES + 1])}")


def _check_statistics(header: Header, listing: Iterable[str], known: Collection[str]) -> None:
    """That every tensor belongs to the weights or to a statistic that is listed."""
    said = set(header.statistics)
    if len(said) < len(header.statistics) or not said <= set(known):
        raise UploadError(
            f"{header.client}: statistics must be among {', '.join(known)}, each once, got {list(header.statistics)}"
        )
    for name in listing:
        part = name.split("/")[0]
        if part not in said | {"weights"}:
            raise UploadError(f"{header.client}: tensor {name!r} must be of a listed statistic, got {part!r}")
