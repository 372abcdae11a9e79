"""One view of every layer: a matrix whose rows are neurons and whose columns are inputs.

`Layer` says where the matrix of a layer lies in a state_dict and how it is stored there. It is plain data and travels
with the weights. A bias is one more column, whose input is always 1. `read` finds all layers of a model by their kind
(see kinds.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from maecho import devices
from maecho.network import kinds
from maecho.network.kinds import Kind

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Layer:
    """Where a matrix lies in a state_dict, and how it is stored."""

    name: str
    """The name of the module. If several modules share a weight, it is that of the first."""
    weight: str
    bias: str | None = None
    groups: int = 1
    """How many separate matrices the weight holds."""
    transposed: bool = False
    """Whether the weight is stored [in, out] instead of [out, in, ...]. Of a convolution: [in, out / groups, ...]."""
    one_hot: bool = False
    """Whether its inputs are tokens, so that its Gram matrix is a diagonal of counts."""
    convolution: bool = False
    """Whether its inputs are patches of a map."""

    @property
    def dense(self) -> bool:
        """Whether it is a fully connected layer: every output depends on every input, and inputs are plain numbers."""
        return not (self.one_hot or self.convolution) and self.groups == 1

    def one_row_each(self, x: Tensor, n: int) -> bool:
        """Whether this input has one row for each of n examples."""
        return self.dense and x.dim() == 2 and len(x) == n

    @property
    def out_axis(self) -> int:
        """The axis of the weight along which its neurons lie. A transposed convolution with groups has no such axis
        unless it is depthwise. Then each input channel has its own neuron, on the first axis."""
        return int(self.transposed and self.groups == 1)

    def matrix(self, weights: Mapping[str, Tensor]) -> Float[Tensor, "g o d"]:
        """[W b], one matrix for each group."""
        W = weights[self.weight]
        if self.transposed:
            inputs, out = W.shape[0] // self.groups, W.shape[1]
            W = W.reshape(self.groups, inputs, out, -1).transpose(1, 2).reshape(self.groups, out, -1)
        else:
            W = W.reshape(self.groups, W.shape[0] // self.groups, -1)
        if self.bias is None:
            return W
        return torch.cat([W, weights[self.bias].reshape(self.groups, -1, 1)], dim=-1)

    def write(self, matrix: Float[Tensor, "g o d"], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `matrix`: parameters of the shapes and dtypes found in `like`."""
        W = like[self.weight]
        out = {}
        if self.bias is not None:
            matrix, b = matrix[..., :-1], matrix[..., -1]
            out[self.bias] = b.reshape(like[self.bias].shape).to(like[self.bias].dtype)
        if self.transposed:
            inputs, neurons = W.shape[0] // self.groups, W.shape[1]
            matrix = matrix.reshape(self.groups, neurons, inputs, -1).transpose(1, 2)
        out[self.weight] = matrix.reshape(W.shape).to(W.dtype).contiguous()
        return out

    def shape(self, weights: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """(groups, out, in) of `matrix`; the values of the weights are not read."""
        W, bias = weights[self.weight], self.bias is not None
        if self.transposed:
            return self.groups, W.shape[1], W.shape[0] // self.groups * W[0, 0].numel() + bias
        return self.groups, W.shape[0] // self.groups, W[0].numel() + bias

    def complaint(self, shapes: Mapping[str, Sequence[int]]) -> str | None:
        """A sentence that says why `matrix` cannot read weights of these shapes. None if it can."""
        for part, axes in ((self.weight, 2), (self.bias, 1)):
            if part is not None and part not in shapes:
                return f"layer {self.name!r} must have its weight {part!r}, got none"
            if part is not None and len(shapes[part]) < axes:
                got = tuple(shapes[part])
                return f"{part!r} must have at least {axes} axes to be read as a matrix, got {got}"
        shape = tuple(shapes[self.weight])
        if self.transposed and not self.convolution and (len(shape) != 2 or self.groups != 1):
            return (
                f"{self.weight!r} must have 2 axes and 1 group, since it is stored with its inputs first, got "
                f"{len(shape)} and {self.groups}"
            )
        if self.one_hot and self.bias is not None:
            return f"layer {self.name!r} must have no bias beside inputs that are tokens, got {self.bias!r}"
        if self.groups < 1 or shape[0] % self.groups:
            first = "inputs" if self.transposed else "outputs"
            return f"layer {self.name!r} must have groups that divide its {shape[0]} {first}, got {self.groups}"
        neurons = self.groups * shape[1] if self.transposed else shape[0]
        if self.bias is not None and math.prod(shapes[self.bias]) != neurons:
            got = tuple(shapes[self.bias])
            return f"{self.bias!r} must have one entry for each of the {neurons} outputs of {self.name!r}, got {got}"
        return None


def find(layers: Iterable[Layer], name: str | None) -> Layer | None:
    """The layer of this name."""
    return next((layer for layer in layers if layer.name == name), None)


def complete(found: Float[Tensor, "g n d"], layer: Layer) -> Tensor:
    """Rows in float64, with one more input that is always 1 if the layer has a bias."""
    return completed(devices.double(found), layer)


def completed(found: Float[Tensor, "g n d"], layer: Layer) -> Tensor:
    """Rows in their own dtype, with one more input that is always 1 if the layer has a bias."""
    found = found.cpu() if found.device.type == "mps" else found  # mps has no float64, in which rows are added up
    return found if layer.bias is None else torch.cat([found, found.new_ones(*found.shape[:-1], 1)], -1)


@dataclass(frozen=True)
class Architecture:
    """The matrices of a model, and what else it holds."""

    layers: dict[str, Layer]
    """Name of a module -> its layer. Modules that share a weight share one Layer."""
    aliases: dict[str, str]
    """Tied parameters: another name -> the name under which the tensor is kept."""
    unknown: tuple[str, ...]
    """Modules that may have an input matrix but are of no known kind, so that their parameters are only averaged."""


def read(model: nn.Module) -> Architecture:
    """Find every matrix of a model."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in state.items():
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            aliases[name] = kept

    layers: dict[str, Layer] = {}
    unknown = []
    by_weight: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=True):
        prefix = f"{name}." if name else ""
        matrices = any(p.dim() > 1 for p in _own_parameters(module))  # a scale of a norm is none
        kind = kinds.find(module)
        if kind is not None and prefix + kind.weight in state:
            layer = _layer(kind, module, name, state, aliases)
            layers[name] = layer
            by_weight.setdefault(layer.weight, []).append(name)
        elif matrices and not isinstance(module, kinds.PLAIN) and _is_leaf(module):
            unknown.append(f"{name} ({type(module).__name__})" if name else type(module).__name__)
    for names in by_weight.values():
        if len(names) > 1:
            _share(names, layers)
    return Architecture(layers, aliases, tuple(unknown))


def _layer(kind: Kind, module: nn.Module, name: str, state: Mapping[str, Tensor], aliases: Mapping[str, str]) -> Layer:
    prefix = f"{name}." if name else ""
    weight, bias = prefix + kind.weight, prefix + kind.bias
    return Layer(
        name=name,
        weight=aliases.get(weight, weight),
        # The Gram matrix of tokens is a diagonal, which has no place for a bias. So the bias is averaged.
        bias=aliases.get(bias, bias) if bias in state and not kind.one_hot else None,
        groups=kind.groups(module),
        transposed=kind.transposed,
        one_hot=kind.one_hot,
        convolution=kind.convolution,
    )


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Its own parameters, and those that its weights are computed of. These are its own too, though torch keeps them in
    a list beside it."""
    if not isinstance(module, parametrize.ParametrizationList):
        yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.get_submodule("parametrizations").parameters()


def _is_leaf(module: nn.Module) -> bool:
    """Whether the module is a layer. A user's container with a free parameter (a class token, a scale) is not one."""
    return type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is None


def _share(names: list[str], layers: dict[str, Layer]) -> None:
    """Make one matrix of modules that share a weight, with the inputs of all of them.

    If their biases differ, there is no common [W b]. Then the weight is merged alone, and the biases are averaged. If a
    module uses the weight in another way (an embedding that is also the output layer), the first module decides how the
    weight is read, and the other one adds no inputs.
    """
    head = layers[names[0]]
    same = [name for name in names if replace(layers[name], name=head.name, bias=head.bias) == head]
    bias = head.bias if all(layers[name].bias == head.bias for name in same) else None
    for name in names:
        if name in same:
            layers[name] = replace(layers[name], name=head.name, bias=bias)
        else:
            del layers[name]
