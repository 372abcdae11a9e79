"""Checks on a batch that every layer is the matrix for which it is read, and that no other parameter is a matrix.

A class that is derived from a layer of torch may do something else in its forward: standardise its weight, count
places instead of tokens, normalise along another axis. What it gives out for its inputs tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from maecho import devices
from maecho.network import kinds
from maecho.network.batches.inputs import examples
from maecho.network.batches.reading import Reader
from maecho.network.hooks import Watch, watching
from maecho.network.layers import Architecture, complete
from maecho.network.units import Unit

EXAMPLES, ROWS = 2, 4096
"""So many examples, and so many rows of them, are looked at."""
TOLERANCE = 2e-3
"""The largest error that counts as rounding, as a share of the outputs. Kernels for float32 may be so coarse."""

FACTORS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0,), "addmm": (1, 2), "addbmm": (1, 2), "baddbmm": (1, 2),
    "_grouped_mm": (0, 1), "convolution": (1,), "embedding": (0,),
}  # fmt: skip
"""An operation of torch -> the places of its arguments that can be weights."""


@contextlib.contextmanager
def misread(model: nn.Module, units: Iterable[Unit], watch: Watch | None = None) -> Iterator[set[str]]:
    """Inside, run the model. Gives the units that gave out something else than their matrix times their inputs.

    Units that do not run are not among them.
    """
    owner = {module: unit for unit in units for module in unit.modules}
    wrong: set[str] = set()

    def after(name: str, module: nn.Module, x: Tensor, z: Tensor) -> None:
        unit = owner[name]
        if unit.name not in wrong and not _is_its_matrix(unit, model, module, x.detach(), z.detach()):
            wrong.add(unit.name)

    with devices.full_precision(), watching(model, owner, after=after, watch=watch):
        yield wrong


class Peeked:
    """Batches that are gone through once. The first one that has examples has been taken out of them."""

    def __init__(self, batches: Iterable[Any], reader: Reader):
        self._batches = batches
        self._rest = iter(batches)
        self.first = next((batch for batch in self._rest if examples(reader.read(batch)[0])), None)

    def __iter__(self) -> Iterator[Any]:
        return self._rest

    def __length_hint__(self) -> int:
        return len(self._batches) if isinstance(self._batches, Sized) else 0


def without(architecture: Architecture, wrong: set[str], model: nn.Module) -> Architecture:
    """The architecture with these layers among the unknown ones."""
    named = [f"{name} ({type(model.get_submodule(name)).__name__})" for name in architecture.layers]
    lost = tuple(text for text, layer in zip(named, architecture.layers.values(), strict=True) if layer.name in wrong)
    kept = {name: layer for name, layer in architecture.layers.items() if layer.name not in wrong}
    return Architecture(kept, architecture.aliases, (*architecture.unknown, *lost))


class Factors(TorchDispatchMode):
    """Notes where the factors of all products, convolutions and lookups lie in memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for k in FACTORS.get(func._schema.name.removeprefix("aten::"), ()):
            if isinstance(args[k], Tensor):
                self._addresses.add(args[k].data_ptr())
        return func(*args, **(kwargs or {}))

    def free(self, model: nn.Module, architecture: Architecture) -> tuple[str, ...]:
        """The parameters that were factors and belong to no layer, nor to a module that is known to be unknown.

        An adapter's A and B are such: x A B in a forward that the user wrote.
        """
        known = {layer.weight for layer in architecture.layers.values()}
        unknown = {text.rpartition(" (")[0] for text in architecture.unknown}
        found = []
        for name, parameter in model.named_parameters():
            owner = name.rpartition(".")[0]
            matrix = sum(size > 1 for size in parameter.shape) > 1
            if matrix and name not in known and owner not in unknown and self._holds(parameter):
                found.append(f"{name} ({type(model.get_submodule(owner)).__name__})")
        return tuple(found)

    def _holds(self, tensor: Tensor) -> bool:
        """Whether the tensor, or a view of it such as its transpose, was a factor."""
        start = tensor.data_ptr()
        return any(start <= at < start + tensor.numel() * tensor.element_size() for at in self._addresses)


@contextlib.contextmanager
def factors(model: nn.Module, watch: Watch | None = None) -> Iterator[Factors]:
    """Inside, run the model. Gives what was a factor in its forward, and in nothing else that runs meanwhile."""
    seen = Factors()
    inside = contextlib.ExitStack()

    def before(name: str, module: nn.Module, x: Tensor) -> None:
        inside.enter_context(seen)

    def after(name: str, module: nn.Module, x: Tensor, z: Any) -> None:
        inside.close()

    with inside, watching(model, [""], before, after, watch=watch):
        yield seen


def _is_its_matrix(unit: Unit, model: nn.Module, module: nn.Module, x: Tensor, z: Tensor) -> bool:
    try:
        if len(x) == len(z) > EXAMPLES and not kinds.unbatched(module, x):
            x, z = x[:EXAMPLES], z[:EXAMPLES]
        if unit.layer.bias is None and not unit.diagonal:
            z = kinds.without_bias(module, z)  # it is averaged, or it is not the same for all modules of the weight
        rows, found = unit.rows(module, x)[:, :ROWS], devices.double(unit.output_rows(module, z))[:, :ROWS]
        matrix = unit.matrix(model)
        expected = matrix[0].T[rows] if unit.layer.one_hot else complete(rows, unit.layer) @ matrix.mT
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return False  # its inputs or outputs have not even the shapes of such a layer
    if expected.shape != found.shape:
        return False
    floats = (t.dtype for t in (x, z, *module.parameters(recurse=False)) if t.is_floating_point())
    coarsest = max(torch.finfo(dtype).eps for dtype in floats)
    gap, size = (expected - found).norm(), torch.maximum(expected.norm(), found.norm())
    return bool(gap <= max(TOLERANCE, 2 * coarsest) * size)
