"""One view of every layer: a matrix whose rows are neurons and whose columns are inputs.

A client's half (`rows`, `output_rows`) turns what enters and leaves a module into rows; the server's half (`Layer`) is
plain data that travels with the weights and says how they are read as matrices [groups, out, in]. A bias
is one more column, whose input is always 1. Nothing after this module asks what kind of layer it holds.

To add a kind: register it with `rows` and `output_rows`, and with `_layer` if its parameters are not called weight and
bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from jaxtyping import Float

# Layers of torch that are parametric but have no input matrix: averaged without a word.
PLAIN = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.PReLU,
)


@dataclass(frozen=True)
class Layer:
    """Where one matrix lies in a state_dict."""

    name: str
    weight: str
    bias: str | None = None
    groups: int = 1
    transposed: bool = False
    """An embedding keeps its neurons in columns and its inputs (tokens) in rows."""

    def matrix(self, weights: Mapping[str, Tensor]) -> Float[Tensor, "g o d"]:
        """[W b], one matrix a group."""
        W = weights[self.weight]
        W = W.T.unsqueeze(0) if self.transposed else W.reshape(self.groups, W.shape[0] // self.groups, -1)
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
        out[self.weight] = (matrix[0].T if self.transposed else matrix).reshape(W.shape).to(W.dtype).contiguous()
        return out

    def shape(self, weights: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """(groups, out, in) without touching the values."""
        W = weights[self.weight]
        if self.transposed:
            return 1, W.shape[1], W.shape[0]
        per_group = W.shape[0] // self.groups
        return self.groups, per_group, W[0].numel() + (self.bias is not None)


@singledispatch
def rows(module: nn.Module, x: Tensor) -> Tensor:
    """The rows [groups, n, in] that this module's weight multiplies when x comes in; integers [1, n]: one-hot rows."""
    raise TypeError(f"{type(module).__name__} is not known as a matrix")


@rows.register
def _(module: nn.Linear, x: Tensor) -> Tensor:
    return x.reshape(1, -1, module.in_features)


@rows.register
def _(module: nn.Embedding, x: Tensor) -> Tensor:
    return x.reshape(1, -1)


@rows.register(nn.Conv1d)
@rows.register(nn.Conv2d)
@rows.register(nn.Conv3d)
def _(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return _patches(module, functional.pad(_batched(module, x), _padding(module), mode=mode), module.stride)


@singledispatch
def output_rows(module: nn.Module, z: Tensor) -> Tensor:
    """What this module gave out, or a gradient of that shape, as rows [groups, n, out] in the order of `rows`."""
    raise TypeError(f"{type(module).__name__} is not known as a matrix")


@output_rows.register(nn.Linear)
@output_rows.register(nn.Embedding)
def _(module: nn.Linear | nn.Embedding, z: Tensor) -> Tensor:
    return z.reshape(1, -1, z.shape[-1])


@output_rows.register(nn.Conv1d)
@output_rows.register(nn.Conv2d)
@output_rows.register(nn.Conv3d)
def _(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, z: Tensor) -> Tensor:
    z = _batched(module, z).movedim(1, -1)
    return z.reshape(-1, module.groups, module.out_channels // module.groups).transpose(0, 1)


def complete(found: Float[Tensor, "g n d"], layer: Layer) -> Tensor:
    """Rows in float64, with the input that is always 1 where the layer has a bias.

    Apple's GPUs have no float64; rows from there go to the CPU.
    """
    found = (found.cpu() if found.device.type == "mps" else found).double()
    return found if layer.bias is None else torch.cat([found, found.new_ones(*found.shape[:-1], 1)], -1)


CHUNK = 2**22
"""Entries of rows held at once: a convolution's patches are many times its input."""


def examples_at_once(module: nn.Module, x: Tensor) -> int:
    """How many examples of x become rows of at most CHUNK entries; one at least."""
    kernel = torch.tensor(getattr(module, "kernel_size", ()), dtype=torch.float64)
    entries = int(x[0].numel() * kernel.prod()) if len(x) else 1
    return max(1, CHUNK // max(1, entries))


def mean_rows(module: nn.Module, x: Tensor) -> Tensor:
    """The rows of the batch's mean input, as the MA-Echo release takes them: of a feature map it sees unpadded patches
    at stride 2, of anything else what `rows` sees."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return rows(module, x.mean(0, keepdim=True))
    mean = _batched(module, x).mean(0, keepdim=True)
    reach = [d * (k - 1) + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
    if any(size < r for size, r in zip(mean.shape[2:], reach, strict=True)):
        return rows(module, mean)  # no unpadded patch fits: the layer's own are the nearest thing
    return _patches(module, mean, (2,) * len(module.kernel_size))


def _batched(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == len(module.kernel_size) + 1 else x


def _padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """In the order of pad: last axis first, before and after."""
    sizes = list(zip(module.kernel_size, module.dilation, strict=True))
    if module.padding == "same":
        both = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in sizes]
    elif module.padding == "valid":
        both = [(0, 0)] * len(sizes)
    else:
        both = [(int(p), int(p)) for p in module.padding]
    return list(itertools.chain.from_iterable(reversed(both)))


def _patches(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Every patch under the kernel as a row, channels first as in the weight: [groups, batch · places, in]."""
    axes = len(module.kernel_size)
    for axis, (k, d, step) in enumerate(zip(module.kernel_size, module.dilation, stride, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, step)[..., ::d]
    # [batch, channels, *places, *kernel] -> [batch, *places, channels, *kernel]
    x = x.permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    n = x.shape[0] * int(torch.tensor(x.shape[1 : 1 + axes]).prod())
    return x.reshape(n, module.groups, -1).transpose(0, 1)


@dataclass(frozen=True)
class Architecture:
    """A model's matrices, and what else it holds."""

    layers: dict[str, Layer]
    """By module name. Modules that share a weight share one Layer."""
    aliases: dict[str, str]
    """Tied parameters: name -> the name under which the tensor is kept."""
    unknown: tuple[str, ...]
    """Modules whose parameters are averaged though they may have an input matrix."""


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
        own = [prefix + key for key, _ in module.named_parameters(recurse=False)]
        if rows.dispatch(type(module)) is not rows.dispatch(nn.Module) and f"{prefix}weight" in state:
            layer = _layer(module, name, state, aliases)
            layers[name] = layer
            by_weight.setdefault(layer.weight, []).append(name)
        elif own and not isinstance(module, PLAIN) and _is_leaf(module):
            unknown.append(f"{name} ({type(module).__name__})" if name else type(module).__name__)
    for names in by_weight.values():
        if len(names) > 1:
            _share(names, layers)
    return Architecture(layers, aliases, tuple(unknown))


def _layer(module: nn.Module, name: str, state: Mapping[str, Tensor], aliases: Mapping[str, str]) -> Layer:
    prefix = f"{name}." if name else ""
    bias = f"{prefix}bias"
    return Layer(
        name=name,
        weight=aliases.get(f"{prefix}weight", f"{prefix}weight"),
        bias=aliases.get(bias, bias) if bias in state else None,
        groups=int(getattr(module, "groups", 1)),
        transposed=isinstance(module, nn.Embedding),
    )


def _is_leaf(module: nn.Module) -> bool:
    """A layer, rather than a user's container that also holds a free parameter (a class token, a scale)."""
    return type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is None


def _share(names: list[str], layers: dict[str, Layer]) -> None:
    """Modules that share a weight become one matrix with the inputs of all of them.

    With biases of their own there is no common [W b]: the weight is merged alone and the biases are averaged. A use in
    the other orientation (an embedding that is also the output layer) follows the first without adding inputs.
    """
    head = layers[names[0]]
    same = [n for n in names if layers[n].transposed == head.transposed and layers[n].groups == head.groups]
    bias = head.bias if all(layers[n].bias == head.bias for n in same) else None
    shared = Layer(head.name, head.weight, bias, head.groups, head.transposed)
    for name in names:
        if name in same:
            layers[name] = shared
        else:
            del layers[name]
