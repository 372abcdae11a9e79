"""What a kind of layer must say, fully connected layers, and tables of tokens.

Everything that depends on the kind of a layer is in this package. All other code calls the functions in its `__init__`.

To add a kind, derive from `Kind`, override what differs from a fully connected layer, and register it. A layer
y = x W + b whose weight is stored [in, out] takes this:

    class InputsFirst(Kind):
        transposed = True

    register(TheirLayer, InputsFirst())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a call."""
    return args[0] if args else kwargs[keyword(kwargs)]


def keyword(kwargs: Mapping[str, Any]) -> str:
    """The name of the first argument of a call without positional ones. The layers of torch call it `input`."""
    return "input" if "input" in kwargs else next(iter(kwargs))


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
    built = False
    """Whether what the matrix multiplies is built from the module's arguments, so that it cannot be put in their
    place."""

    def reads(self, module: Any) -> bool:
        """Whether this module is such a matrix. If not, it is averaged, and a warning names it."""
        return True

    def entering(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The tensor from which `rows` makes rows, from the arguments of a call: the first of them."""
        x: Tensor = first(args, kwargs)
        return x

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
        """For rows that are all patches of maps at stride 1: these maps [groups, batch, height, width, channels] and
        the kernel. None for other rows."""
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
        return W.shape[0] // self.groups(module) * W[0, 0].numel() if self.transposed else W[0].numel()

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
