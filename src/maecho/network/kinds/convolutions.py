"""Convolutions and transposed convolutions: a matrix on patches of a map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.network.kinds.kind import Kind, first


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
        """None for more than two axes, other strides, dilation, and kernels of 1, and for derived kinds with other
        rows."""
        axes = len(module.kernel_size)
        if type(self).rows is not Convolution.rows:
            return None
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

    def resize(self, module: Any, shape: Sequence[int]) -> None:
        if module.groups == 1:
            super().resize(module, shape)
        else:  # only a depthwise layer can grow, where every channel is a group of its own
            module.in_channels = module.out_channels = module.groups = shape[0]


class TransposedConvolution(Convolution):
    """A convolution, at stride 1, of a map with zeros between its entries, with the kernel turned round.

    The zeros and the padding are put in where a call is seen. In a row the kernel is turned, so the weight stays as it
    is stored, [in, out / groups, *kernel].
    """

    transposed = True
    built = True

    def entering(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        x: Tensor = first(args, kwargs)
        wanted = args[1] if len(args) > 1 else kwargs.get("output_size")
        axes = len(module.kernel_size)
        sizes = [step * (n - 1) + 1 for n, step in zip(x.shape[-axes:], module.stride, strict=True)]
        spread = x.new_zeros(*x.shape[:-axes], *sizes)
        entries = spread
        for axis, step in enumerate(module.stride, start=-axes):
            entries = entries.unfold(axis - (entries.dim() - spread.dim()), 1, step)
        entries.copy_(x.detach().reshape(entries.shape))
        before = [d * (k - 1) - p for k, d, p in _geometry(module)]
        after = [b + extra for b, extra in zip(before, module.output_padding, strict=True)]
        if wanted is not None:  # the call itself says how large its output is
            whole = zip(wanted[-axes:], before, sizes, _geometry(module), strict=True)
            after = [size - n - b + d * (k - 1) for size, b, n, (k, d, _) in whole]
        return functional.pad(spread, _last_first(zip(before, after, strict=True)))

    def rows(self, module: Any, x: Tensor) -> Tensor:
        return _patches(module, _batched(module, x), (1,) * len(module.kernel_size), turned=True)

    def mean_rows(self, module: Any, means: Tensor) -> Tensor:
        """The rows of the mean maps. The release has no such layers."""
        return self.rows(module, means)


def _geometry(module: nn.modules.conv._ConvNd) -> Iterable[tuple[int, int, int]]:
    """Size of the kernel, dilation and padding of every axis."""
    return zip(module.kernel_size, module.dilation, map(int, module.padding), strict=True)


def _last_first(both: Iterable[tuple[int, int]]) -> list[int]:
    """What is put before and after each axis, in the order of torch's `pad`: the last axis comes first."""
    return list(itertools.chain.from_iterable(reversed(list(both))))


def _batched(module: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == len(module.kernel_size) + 1 else x


def _padding(module: nn.modules.conv._ConvNd) -> list[int]:
    """The padding in the order of torch's `pad`."""
    sizes = list(zip(module.kernel_size, module.dilation, strict=True))
    if module.padding == "same":
        both = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in sizes]
    elif module.padding == "valid":
        both = [(0, 0)] * len(sizes)
    else:
        both = [(int(p), int(p)) for p in module.padding]
    return _last_first(both)


def _patches(module: nn.modules.conv._ConvNd, x: Tensor, stride: tuple[int, ...], turned: bool = False) -> Tensor:
    """Every patch under the kernel as a row, [groups, batch · places, in]. Channels come first, as in the weight.

    `turned` reads each patch from its end.
    """
    axes = len(module.kernel_size)
    for axis, (k, d, step) in enumerate(zip(module.kernel_size, module.dilation, stride, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, step)[..., ::d]
    if turned:
        x = x.flip(*range(2 + axes, 2 + 2 * axes))
    # [batch, channels, *places, *kernel] -> [batch, *places, channels, *kernel]
    x = x.permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    n = math.prod(x.shape[: 1 + axes])
    return x.reshape(n, module.groups, -1).transpose(0, 1)
