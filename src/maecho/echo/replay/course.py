"""The course of a forward pass: in which order modules run, and who uses what they give out.

A relay runs a network at every stage. Whatever has happened before the first unit that is not fitted yet will happen in
the same way at every later stage. So modules that have ended by then can be skipped. The output of a skipped module is
needed only if something else than skipped modules uses it: in a chain of layers the last one is, with residual sums
some more are. A pass over two examples shows all that.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Forward = Callable[..., Any]
_FACTS = {"shape", "device", "dtype", "ndim", "layout", "requires_grad", "is_cuda", "size", "dim", "__len__", "numel"}
"""What may be asked of a tensor without its values."""
_SIMPLE = (Tensor, type(None), bool, int, float, str)


@contextlib.contextmanager
def forwards(model: nn.Module, changed: Mapping[str, Callable[[Forward], Forward]]) -> Iterator[None]:
    """Inside, the named modules have other forwards. Each is made from the module's own."""
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for name, change in changed.items():
            module = model.get_submodule(name)
            before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = change(module.forward)
        yield
    finally:
        for module, own in reversed(before):
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


@dataclass(frozen=True)
class Course:
    """What one pass has shown. Modules that ran more than once are never skipped."""

    begins: Mapping[str, int]
    """Name of a module -> when it began to run for the first time."""
    ends: Mapping[str, int]
    """Name of a module that ran once -> when it ended."""
    inside: Mapping[str, frozenset[str]]
    """Name of a module -> the modules that it ran inside of."""
    users: Mapping[str, frozenset[frozenset[str]]]
    """Name of a module -> for each use of its outputs: the modules inside of which that was."""
    chains: Mapping[str, tuple[str, ...]]
    """Name of an nn.Sequential -> its modules in order."""
    _skips: dict[int, Skips] = field(default_factory=dict)

    def skips(self, until: int) -> Skips:
        """What a pass can skip if everything up to this moment is final."""
        if until not in self._skips:
            self._skips[until] = self._found(until)
        return self._skips[until]

    def _found(self, until: int) -> Skips:
        done = {name for name, end in self.ends.items() if end < until}
        outermost = {name for name in done if not done & self.inside[name]}
        passed_over: set[str] = set()
        chains: dict[str, int] = {}
        for chain, modules in self.chains.items():
            first = list(itertools.takewhile(outermost.__contains__, modules))
            uses = [self.users[name] for name in first[:-1]]
            # Nothing but the chain may read the outputs in its middle.
            if chain not in done and len(first) > 1 and not any(self._needed(found, outermost) for found in uses):
                chains[chain] = len(first) - 1
                passed_over.update(first[:-1])
        kept = {name: self._needed(self.users[name], outermost) for name in outermost - passed_over}
        return Skips(kept, chains)

    @staticmethod
    def _needed(uses: frozenset[frozenset[str]], outermost: set[str]) -> bool:
        return any(not outermost & places for places in uses)


@dataclass(frozen=True)
class Skips:
    """The modules that a pass can skip. Modules inside of others that are skipped are not named."""

    needed: Mapping[str, bool]
    """Name of a module -> whether its output is needed."""
    chains: Mapping[str, int]
    """Name of an nn.Sequential -> how many of its modules are passed over. The next one is skipped too, and its output
    is what the chain goes on with."""


def course_of(model: nn.Module, run: Callable[[], object]) -> Course:
    """Watch one pass. `run` makes it.

    A module is not skipped if others read something of it beside its output, such as an attribute that it sets.
    """
    clock, stack = itertools.count(1), list[str]()
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    inside: dict[str, frozenset[str]] = {}
    odd: set[str] = set()
    users: dict[str, set[frozenset[str]]] = {}
    # The tensors are kept, so that no two have one id.
    made: dict[int, tuple[Tensor, set[str]]] = {}  # outputs, and the modules that gave them out
    born: dict[
        int, tuple[Tensor, frozenset[str]]
    ] = {}  # all results, and the modules that they were computed inside of

    def watched(name: str) -> Callable[[Forward], Forward]:
        def change(forward: Forward) -> Forward:
            def again(*args: Any, **kwargs: Any) -> Any:
                if name in begins:
                    odd.add(name)
                begins.setdefault(name, next(clock))
                inside[name] = frozenset(stack)
                stack.append(name)
                try:
                    out = forward(*args, **kwargs)
                finally:
                    stack.pop()
                ends[name] = next(clock)
                leaves = tree_leaves(out)
                if not all(isinstance(leaf, _SIMPLE) for leaf in leaves):
                    odd.add(name)
                for leaf in leaves:
                    if isinstance(leaf, Tensor):
                        made.setdefault(id(leaf), (leaf, set()))[1].add(name)
                users.setdefault(name, set())
                return out

            return again

        return change

    class Uses(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            of = getattr(getattr(function, "__self__", None), "__name__", "")
            if of not in _FACTS and getattr(function, "__name__", "") not in _FACTS:
                here = frozenset(stack)
                for leaf in tree_leaves((args, kwargs or {})):
                    givers = made.get(id(leaf), (leaf, set[str]()))[1]
                    for name in givers:
                        users[name].add(here)
                    # It came out of these modules by another way than their outputs, so they must run every time.
                    odd.update(born.get(id(leaf), (leaf, here))[1] - here - givers)
            out = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    born.setdefault(id(leaf), (leaf, frozenset(stack)))
            return out

    names = [name for name, _ in model.named_modules() if name]
    with torch.no_grad(), forwards(model, {name: watched(name) for name in names}), Uses():
        run()
    return Course(
        begins,
        {name: end for name, end in ends.items() if name not in odd},
        inside,
        {name: frozenset(found) for name, found in users.items()},
        {
            name: tuple(f"{name}.{child}" if name else child for child, _ in module.named_children())
            for name, module in model.named_modules()
            if type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__
        },
    )
