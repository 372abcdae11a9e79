"""The twin of a network: a copy that computes the same, in which every matrix is a plain layer's weight.

Packed attentions and recurrent modules are split into their matrices, and weights that are computed (weight norm,
spectral norm) are parameters. The twin is what statistics are gathered on and what a relay fits. `packed` turns its
state_dict into one of the original.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.errors import InputError, text_of
from maecho.network.packed import attention, parametrized
from maecho.network.packed.linears import Linears, Split
from maecho.network.packed.recurrence import SplitCell, SplitRecurrence
from maecho.network.packed.storage import Stored, pack, packed_names

_SPLITS: dict[type[nn.Module], Callable[..., Split]] = {
    nn.MultiheadAttention: attention.SplitAttention,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), SplitRecurrence),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), SplitCell),
}


TOLERANCE = 2e-3
"""The largest difference that counts as rounding, as a share of the outputs."""


@dataclass(frozen=True)
class Twin:
    """A network whose matrices are all weights of plain layers, and how the original stores them."""

    network: nn.Module
    stored: tuple[Stored, ...]
    """How tensors of the original are made of the twin's. Empty if nothing was split: then the twin is the original, or
    a copy of it."""
    names: tuple[str, ...]
    """The names in the original's state_dict."""

    def packed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn a state_dict of the twin into one of the original."""
        found = pack(state, self.stored)
        return {name: found[name] for name in self.names}

    def packed_names(self, names: Iterable[str]) -> list[str]:
        """The tensors of the original that are made of these tensors of the twin alone."""
        chosen = set(packed_names(names, self.network.state_dict(), self.stored))
        return [name for name in self.names if name in chosen]

    def in_words_of_the_model(self, part: str) -> str:
        """Name a module of the twin that the original does not have by the original's tensors: "cell.hh_l0 (why)" is
        "cell.weight_hh_l0, cell.bias_hh_l0 (why)". Everything else stays as it is."""
        name, space, why = part.partition(" ")
        inside = [tensor for tensor in self.network.state_dict() if tensor.startswith(f"{name}.")]
        made = [] if set(inside) <= set(self.names) else self.packed_names(inside)
        return f"{', '.join(made) or name}{space}{why}"


def twin_of(model: nn.Module, without: Collection[str] = (), always_copy: bool = True) -> Twin:
    """The twin of a network, in evaluation mode. The network is not changed.

    Args:
        model: the network.
        without: names of modules that stay whole.
        always_copy: whether a network with nothing to split is copied, too. If not, it is given back as it is, in its
            own mode.
    """
    names = tuple(model.state_dict())
    if not always_copy and not any(_to_split(m) or parametrized.readable(m) for _, m in _modules(model, without)):
        return Twin(model, (), names)
    twin = copied(model).eval()
    linears = Linears()
    stored: dict[nn.Module, list[Stored]] = {}
    everything = list(_modules(twin, without))
    for module in dict.fromkeys(module for _, module in everything):
        stored[module] = parametrized.plain_weights(module)
    parts = {m: _SPLITS[type(m)](m, linears).eval() for _, m in everything if _to_split(m)}
    found: list[Stored] = []
    owners: dict[str, str] = {}
    for name, module in everything:
        prefix = f"{name}." if name else ""
        inner = stored[module]
        if module in parts:
            inner = _composed(inner, parts[module].stored())
        found += [replace(one, name=prefix + one.name, parts=tuple(prefix + p for p in one.parts)) for one in inner]
        owners |= {prefix + one.name: name for one in inner}
    network = _joined(twin, parts, everything)
    untied = {owners[name] for name in _untied(model, network, found) if name in owners}
    if untied:
        return twin_of(model, {*without, *untied}, always_copy)
    return Twin(network, tuple(one for one in found if (one.name,) != one.parts), names)


def _joined(twin: nn.Module, parts: Mapping[nn.Module, Split], everything: list[tuple[str, nn.Module]]) -> nn.Module:
    """The network with splits in the places of their modules."""
    for name, module in everything:
        if module in parts:
            if not name:
                return parts[module]
            owner, _, part = name.rpartition(".")
            setattr(twin.get_submodule(owner), part, parts[module])
    for module in twin.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # only its fused function takes nested tensors
    return twin


def _untied(model: nn.Module, twin: nn.Module, stored: list[Stored]) -> list[str]:
    """The tensors that are tied in the model and would not be in the twin."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
    ids = {name: id(tensor) for name, tensor in twin.state_dict(keep_vars=True).items()}
    made = {one.name: (one.form, one.axis, *(ids[part] for part in one.parts)) for one in stored}
    of_names = [[(name, made.get(name, ("rows", 0, ids.get(name)))) for name in tied] for tied in names.values()]
    return [name for tied in of_names for name, _ in tied if len({how for _, how in tied}) > 1]


def _modules(model: nn.Module, without: Collection[str]) -> list[tuple[str, nn.Module]]:
    kept = {module for name, module in model.named_modules(remove_duplicate=False) if name in without}
    return [(n, m) for n, m in model.named_modules(remove_duplicate=False) if m not in kept]


def _to_split(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that keep several matrices in one parameter, and nobody changed what it
    computes."""
    if type(module) not in _SPLITS or "forward" in vars(module):
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    return not isinstance(module, nn.MultiheadAttention) or attention.can_split(module)


def _composed(outer: list[Stored], inner: list[Stored]) -> list[Stored]:
    """How a module's tensors are made, where weights that they are made of are made of others."""
    made = {one.name: one.parts for one in inner}
    of_outer = [
        replace(one, parts=tuple(part for name in one.parts for part in made.get(name, (name,)))) for one in outer
    ]
    named = {part for one in outer for part in one.parts}
    return [*of_outer, *(one for one in inner if one.name not in named)]


def copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    # Hooks such as torch's older weight norm leave a computed tensor behind, which deepcopy does not take.
    computed = (
        value
        for module in model.modules()
        for values in vars(module).values()
        for value in (values if isinstance(values, list) else [values])
        if isinstance(value, Tensor) and not value.is_leaf
    )
    try:
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed})
    except Exception as error:  # copying a model may raise anything
        raise InputError(
            f"the model must be one that copy.deepcopy can copy, got {type(model).__name__}: {text_of(error)}"
        ) from error


@contextlib.contextmanager
def compared(twin: Twin, model: nn.Module) -> Iterator[set[str]]:
    """Inside, run the twin. Gives the names of split modules that compute something else than they do in the model,
    which is in evaluation mode."""
    wrong: set[str] = set()
    split = {name: m for name, m in twin.network.named_modules() if isinstance(m, Split)}
    pairs = {name: m for name, m in split.items() if not isinstance(model.get_submodule(name), Split)}

    def looking(name: str) -> Callable[[tuple[Any, ...], dict[str, Any], Any], None]:
        def look(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            with torch.no_grad():
                expected = model.get_submodule(name)(*args, **kwargs)
            if not _close(out, expected):
                wrong.add(name)

        return look

    for name, module in pairs.items():
        module.beside = looking(name)
    try:
        with devices.full_precision():
            yield wrong
    finally:
        for module in pairs.values():
            module.beside = None


def _close(out: Any, expected: Any) -> bool:
    """Whether two outputs are equal up to rounding."""
    if isinstance(out, Tensor) and isinstance(expected, Tensor):
        if out.shape != expected.shape or out.dtype != expected.dtype:
            return False
        if not out.is_floating_point():
            return torch.equal(out, expected)
        a, b = (torch.nan_to_num(t.double()) for t in (out, expected))  # a mask may leave NaN
        limit = max(TOLERANCE, 2 * torch.finfo(out.dtype).eps) * torch.maximum(a.norm(), b.norm())
        return torch.equal(out.isnan(), expected.isnan()) and bool((a - b).norm() <= limit)
    if isinstance(out, tuple | list) and isinstance(expected, tuple | list):
        return len(out) == len(expected) and all(map(_close, out, expected))
    return out is None or expected is None or bool(out == expected)
