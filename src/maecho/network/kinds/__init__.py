"""Kinds of layers: how inputs and outputs become rows of a matrix product, and how the weight is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from maecho.network.kinds.convolutions import Convolution, TransposedConvolution
from maecho.network.kinds.kind import Embedding, Kind, first, keyword
from maecho.network.kinds.products import Bag, Bilinear, InputsFirst

__all__ = ["Convolution", "Embedding", "Kind", "TransposedConvolution", "first", "keyword"]

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


_KINDS: dict[type[nn.Module], Kind] = {}
_BY_NAME: dict[str, Kind] = dict.fromkeys(
    ("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D"), InputsFirst()
)
"""Kinds of classes of other packages, which are not imported for it."""


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
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(_transposed, TransposedConvolution())
register(nn.Bilinear, Bilinear())
register(nn.EmbeddingBag, Bag())


def _own(module_type: type) -> Kind | None:
    """The kind that was registered for this very class."""
    return _KINDS.get(module_type) or _BY_NAME.get(f"{module_type.__module__}.{module_type.__qualname__}")


def registered(module: nn.Module) -> bool:
    """Whether the type of the module was itself registered. Then no derived class has changed its forward."""
    return _own(type(module)) is not None


def find(module: nn.Module) -> Kind | None:
    """The kind of a module: that of its nearest registered class. None if it is no matrix."""
    kind = next((own for c in type(module).__mro__ if (own := _own(c)) is not None), None)
    return kind if kind is not None and kind.reads(module) else None


def of(module: nn.Module) -> Kind:
    """The kind of a module that is a matrix."""
    kind = find(module)
    if kind is None:
        raise TypeError(f"{type(module).__name__} is not known as a matrix")
    return kind


def entering(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor x that the functions below take as a module's input, from the arguments of a call."""
    kind = find(module)
    try:
        return Kind().entering(module, args, kwargs) if kind is None else kind.entering(module, args, kwargs)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        # A derived class may take other arguments. The check on the first batch finds that its rows do not fit.
        x: Tensor = first(args, kwargs)
        return x


def built(module: nn.Module) -> bool:
    """Whether x is built from the arguments of a call, so that another x cannot take their place."""
    return of(module).built


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
