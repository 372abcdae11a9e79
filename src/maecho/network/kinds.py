"""Kinds of layers: how inputs and outputs become rows of a matrix product, and how the weight is stored.

Everything that depends on the kind of a layer is in this module. All other code calls the functions below.

To add a kind, derive from `Kind`, override what differs from a fully connected layer, and register it. A layer
y = x W + b whose weight is stored [in, out] takes this:

    class InputsFirst(Kind):
        transposed = True

    register(Conv1D, InputsFirst())
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Modules of torch that have parameters but no input matrix. They are averaged without a warning.
PLAIN = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.PReLU,
)

CHUNK = 2**22
"""The most entries of rows in memory at a time. The patches of a convolution take many times the memory of
its input."""


class Kind:
    """A kind of layer. This class is a fully connected layer: y = x Wᵀ + b over the last axis of x."""

    weight = "weight"
    """The name of the parameter that is the matrix."""
    bias = "bias"
    """The name of the parameter that is added to the product. A layer may lack it."""
    sizes = ("in_features", "out_features")
    """The attributes of the module that say how many inputs and outputs it has. A module may lack them."""
    transposed = False
    """Whether the weight is stored [in, out] instead of [out, in, ...]."""
    one_hot = False
    """Whether the inputs are tokens: each stands for a row that is 1 at the token and 0 elsewhere."""
    convolution = False
    """Whether the rows are patches of a map."""

    def groups(self, module: Any) -> int:
        """How many separate matrices there are. Each has its own part of the inputs and outputs."""
        return 1

    def example_axes(self, module: Any) -> int:
        """How many axes the input of one example has."""
        return 1

    def rows(self, module: Any, x: Tensor) -> Tensor:
        """The rows that the matrix multiplies, [groups, n, in]. For tokens: the tokens themselves, [1, n]."""
        return x.reshape(1, -1, x.shape[-1])

    def maps(self, module: Any, x: Tensor) -> tuple[Tensor, tuple[int, int]] | None:
        """For rows that are all patches of maps at stride 1: these maps and the kernel; see the function `maps`."""
        return None

    def output_rows(self, module: Any, z: Tensor) -> Tensor:
        """The module's outputs, or gradients of their shape, as rows [groups, n, out] in the order of `rows`."""
        return z.reshape(1, -1, z.shape[-1])

    def mean_rows(self, module: Any, means: Tensor) -> Tensor:
        """The rows of mean inputs [n, ...], in order: [groups, rows of all means, in]."""
        return self.rows(module, means)

    def copies(self, module: Any) -> int:
        """The largest number of rows in which one entry of the input occurs."""
        return 1

    def inputs(self, module: Any) -> int:
        """How many inputs a row has; a bias is not counted."""
        W: Tensor = getattr(module, self.weight)
        return W.shape[0] if self.transposed else W[0].numel()

    def without_bias(self, module: Any, z: Tensor) -> Tensor:
        """The module's outputs for a batch, minus its bias."""
        b = getattr(module, self.bias, None)
        return z if b is None else z - b

    def frozen_token(self, module: Any) -> int | None:
        """The token whose weights get no gradient. None if there is no such token."""
        return None

    def resize(self, module: Any, shape: Sequence[int]) -> None:
        """Tell the module that its weight has a new shape."""
        of_outputs = int(self.transposed)
        for attribute, size in zip(self.sizes, (shape[1 - of_outputs], shape[of_outputs]), strict=True):
            if hasattr(module, attribute):
                setattr(module, attribute, size)


class Embedding(Kind):
    """A table with one row of outputs for each token."""

    sizes = ("num_embeddings", "embedding_dim")
    transposed = True
    one_hot = True

    def example_axes(self, module: Any) -> int:
        return 0

    def rows(self, module: Any, x: Tensor) -> Tensor:
        return x.reshape(1, -1)

    def frozen_token(self, module: Any) -> int | None:
        token: int | None = module.padding_idx
        return token


class Convolution(Kind):
    """A matrix on the patches of a map, with the layer's own stride, padding, dilation and groups."""

    sizes = ("in_channels", "out_channels")
    convolution = True

    def groups(self, module: Any) -> int:
        return int(module.groups)

    def example_axes(self, module: Any) -> int:
        return 1 + len(module.kernel_size)

    def rows(self, module: Any, x: Tensor) -> Tensor:
        return _patches(module, self._padded(module, x), module.stride)

    def _padded(self, module: Any, x: Tensor) -> Tensor:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return functional.pad(_batched(module, x), _padding(module), mode=mode)

    def maps(self, module: Any, x: Tensor) -> tuple[Tensor, tuple[int, int]] | None:
        """Padded maps [groups, batch, height, width, channels] whose patches at stride 1 are the rows, and the kernel.
        None if no such maps exist."""
        axes = len(module.kernel_size)
        if axes > 2 or {*module.stride, *module.dilation} != {1} or {*module.kernel_size} == {1}:
            return None
        padded = self._padded(module, x)
        if any(size < k for size, k in zip(padded.shape[2:], module.kernel_size, strict=True)):
            return None
        padded = padded.reshape(len(padded), module.groups, -1, *([1] * (2 - axes)), *padded.shape[2:])
        kernel = (1, *module.kernel_size)[-2:]
        return padded.permute(1, 0, 3, 4, 2).clone(memory_format=torch.contiguous_format), kernel

    def output_rows(self, module: Any, z: Tensor) -> Tensor:
        z = _batched(module, z).movedim(1, -1)
        return z.reshape(-1, module.groups, module.out_channels // module.groups).transpose(0, 1)

    def mean_rows(self, module: Any, means: Tensor) -> Tensor:
        """The rows as the MA-Echo release computes them: unpadded patches of each mean map, at stride 2."""
        reach = [d * (k - 1) + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        if any(size < r for size, r in zip(means.shape[2:], reach, strict=True)):
            return self.rows(module, means)  # no unpadded patch fits, so the layer's own patches are used
        return _patches(module, means, (2,) * len(module.kernel_size))

    def copies(self, module: Any) -> int:
        return math.prod(module.kernel_size)

    def without_bias(self, module: Any, z: Tensor) -> Tensor:
        return z if module.bias is None else z - module.bias.reshape(-1, *[1] * len(module.kernel_size))


def _batched(module: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == len(module.kernel_size) + 1 else x


def _padding(module: nn.modules.conv._ConvNd) -> list[int]:
    """The padding in the order of torch's `pad`: the last axis first, and on each axis before and after."""
    sizes = list(zip(module.kernel_size, module.dilation, strict=True))
    if module.padding == "same":
        both = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in sizes]
    elif module.padding == "valid":
        both = [(0, 0)] * len(sizes)
    else:
        both = [(int(p), int(p)) for p in module.padding]
    return list(itertools.chain.from_iterable(reversed(both)))


def _patches(module: nn.modules.conv._ConvNd, x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Every patch under the kernel as a row, [groups, batch · places, in]. Channels come first, as in the weight."""
    axes = len(module.kernel_size)
    for axis, (k, d, step) in enumerate(zip(module.kernel_size, module.dilation, stride, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, step)[..., ::d]
    # [batch, channels, *places, *kernel] -> [batch, *places, channels, *kernel]
    x = x.permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    n = math.prod(x.shape[: 1 + axes])
    return x.reshape(n, module.groups, -1).transpose(0, 1)


_KINDS: dict[type[nn.Module], Kind] = {}


def register(module_type: type[nn.Module], kind: Kind) -> None:
    """Let modules of this type, and of types derived from it, be read as matrices of this kind."""
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(f"a kind must be registered for a class of nn.Module, got {module_type!r}")
    if not isinstance(kind, Kind):
        raise TypeError(f"{module_type.__name__} must be registered with an object of a class of Kind, got {kind!r}")
    _KINDS[module_type] = kind


register(nn.Linear, Kind())
register(nn.Embedding, Embedding())
for _type in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register(_type, Convolution())


def registered(module: nn.Module) -> bool:
    """Whether the type of the module was itself registered. Then no derived class has changed its forward."""
    return type(module) in _KINDS


def find(module: nn.Module) -> Kind | None:
    """The kind of a module: that of its nearest registered class. None if it is no matrix."""
    return next((_KINDS[c] for c in type(module).__mro__ if c in _KINDS), None)


def of(module: nn.Module) -> Kind:
    """The kind of a module that is a matrix."""
    kind = find(module)
    if kind is None:
        raise TypeError(f"{type(module).__name__} is not known as a matrix")
    return kind


def rows(module: nn.Module, x: Tensor) -> Tensor:
    """The rows [groups, n, in] that the module's weight multiplies for the input x. For tokens: whole numbers
    [1, n]."""
    return of(module).rows(module, x)


def maps(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, int]] | None:
    """Maps [groups, batch, height, width, channels] and a kernel whose patches at stride 1 are the rows. None if the
    rows are no such patches."""
    return of(module).maps(module, x)


def output_rows(module: nn.Module, z: Tensor) -> Tensor:
    """The module's output, or a gradient of its shape, as rows [groups, n, out] in the order of `rows`."""
    return of(module).output_rows(module, z)


def mean_rows(module: nn.Module, means: Tensor) -> Tensor:
    """The rows of mean inputs [n, ...], as the MA-Echo release takes them, in order."""
    return of(module).mean_rows(module, means)


def inputs(module: nn.Module) -> int:
    """How many inputs a row has; a bias is not counted."""
    return of(module).inputs(module)


def without_bias(module: nn.Module, z: Tensor) -> Tensor:
    """The module's output for a batch, minus its bias."""
    return of(module).without_bias(module, z)


def frozen_token(module: nn.Module) -> int | None:
    """The token whose weights get no gradient from the module: the padding of an embedding. None if there is none."""
    return of(module).frozen_token(module)


def examples_first(module: nn.Module, x: Tensor, z: Tensor, n: int) -> bool:
    """Whether input and output have n examples on their first axis."""
    return x.dim() > of(module).example_axes(module) and len(x) == len(z) == n


def unbatched(module: nn.Module, x: Tensor) -> bool:
    """Whether x is one example without a batch axis. A module that is no matrix (a norm) counts as fully connected."""
    return x.dim() == (find(module) or Kind()).example_axes(module)


def examples_at_once(module: nn.Module, x: Tensor) -> int:
    """How many examples of x become rows of at most CHUNK entries, but at least one. A module that is no matrix (a
    norm) counts as fully connected."""
    entries = x[0].numel() * (find(module) or Kind()).copies(module) if len(x) else 1
    return max(1, CHUNK // max(1, entries))
