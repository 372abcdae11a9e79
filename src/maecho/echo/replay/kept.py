"""Keeps what modules gave out for each batch, so that later passes over the same batch need not run them again.

Of modules whose outputs nobody needs, only shapes are kept. In their place NaN is given out: if anything used it after
all, the sums would not be finite, and the relay would stop. Batches are known by their content, so they may come in
another order. What does not fit into memory is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from maecho.echo.replay.course import Course, Forward, forwards

Change = Callable[[Forward], Forward]

MEMORY = 2**30
"""How many bytes all clients of a server, or one client with its data, keep."""


class Budget:
    """The bytes that are left."""

    def __init__(self, left: int = MEMORY):
        self.left = left

    def take(self, size: int) -> bool:
        """Take so many bytes if there are as many."""
        if size > self.left:
            return False
        self.left -= size
        return True


def key_of(inputs: list[Tensor]) -> bytes:
    """The digest of a batch."""
    found = hashlib.sha256()
    for tensor in inputs:
        found.update(repr((tensor.dtype, tensor.shape)).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.digest()


class Kept:
    """The outputs of one network for each batch."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._of: dict[bytes, _Record] = {}
        self._fragile: set[str] = set()
        """Modules into whose outputs others write. They are kept, and given out, as copies."""

    def until(self, key: bytes) -> int:
        """The moment up to which this batch is known. 0 if nothing of it is."""
        return self._of[key].until if key in self._of else 0

    def forget(self) -> None:
        """Forget everything."""
        for key in list(self._of):
            self.drop(key)

    @contextlib.contextmanager
    def running(self, network: nn.Module, course: Course, key: bytes, until: int) -> Iterator[None]:
        """Inside, the network runs on the batch of this key. What is known is not computed, and what will be known for
        the next pass is kept: everything that ends before the moment `until`."""
        record = self._of.get(key, _Record(0, {}, 0))
        wanted = course.skips(until)
        if not (record.until or wanted.needed):
            yield
            return
        known = record.outputs
        seen: dict[str, Any] = {}
        handed: list[tuple[str, Tensor, int]] = []
        twice = False

        def note(name: str, out: Any) -> Any:
            """What is given out: the output itself, or a copy where others write into it."""
            nonlocal twice
            twice = twice or name in seen
            seen[name] = out
            if name in self._fragile or any(torch.is_inference(leaf) for leaf in _tensors(out)):
                return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, out)
            handed.extend((name, leaf, leaf._version) for leaf in _tensors(out) if not _stands_in(leaf))
            return out

        def given(name: str) -> Change:
            return lambda forward: lambda *args, **kwargs: note(name, known[name])

        def kept(name: str) -> Change:
            return lambda forward: lambda *args, **kwargs: note(name, forward(*args, **kwargs))

        def chained(name: str, passed_over: int) -> Change:
            modules = course.chains[name]

            def again(x: Any) -> Any:
                x = note(modules[passed_over], known[modules[passed_over]])
                for module in modules[passed_over + 1 :]:
                    x = network.get_submodule(module)(x)
                return x

            return lambda forward: again

        short = course.skips(record.until).chains
        in_chains = {course.chains[name][count] for name, count in short.items()}
        changed = {name: given(name) for name in known.keys() - in_chains}
        changed |= {name: chained(name, count) for name, count in short.items()}
        changed |= {name: kept(name) for name in wanted.needed.keys() - known.keys()}
        ended = False
        try:
            with forwards(network, changed):
                yield
            ended = True
        except BaseException as reason:
            ended = not isinstance(reason, Exception)  # Enough ends a pass
            raise
        finally:
            written = {name for name, leaf, version in handed if leaf._version != version}
            self._fragile |= written
            if written & known.keys():
                self.drop(key)
            if ended and not twice and not written and wanted.needed.keys() <= seen.keys():
                self._keep(key, until, {name: _kept(seen[name], needed) for name, needed in wanted.needed.items()})

    def _keep(self, key: bytes, until: int, outputs: dict[str, Any]) -> None:
        storages = {
            leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
            for out in outputs.values()
            for leaf in _tensors(out)
        }
        self.drop(key)
        size = sum(storages.values())
        if self._budget.take(size):
            self._of[key] = _Record(until, outputs, size)

    def drop(self, key: bytes) -> None:
        """Forget one batch."""
        if key in self._of:
            self._budget.left += self._of.pop(key).size


@dataclass(frozen=True)
class _Record:
    """What is known of one batch."""

    until: int
    outputs: Mapping[str, Any]
    size: int


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _kept(out: Any, needed: bool) -> Any:
    """The output as it is, or NaN of its shape if nobody needs it. Whole numbers are kept."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if needed or not leaf.is_floating_point() or _stands_in(leaf):
            return leaf.detach()
        return leaf.new_full((), float("nan")).expand(leaf.shape)

    return tree_map(change, out)


def _stands_in(leaf: Tensor) -> bool:
    """Whether it stands for an output that nobody needs."""
    return leaf.dim() > 0 and not any(leaf.stride()) and leaf.numel() > 1
