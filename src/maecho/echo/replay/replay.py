"""What a client of a relay keeps from stage to stage: the outputs of its own network and of the merged one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from maecho import devices
from maecho.echo.replay.course import Course, course_of
from maecho.echo.replay.kept import Budget, Kept, key_of
from maecho.network.attention import slow_path
from maecho.network.batches.inputs import examples, leaves, subset
from maecho.network.forward import call
from maecho.network.hooks import remove_all
from maecho.network.units import Unit


class Replay:
    """Runs both networks on one batch after the other, and skips what is known.

    Args:
        budget: the bytes that may be kept. Several clients can share one.
    """

    def __init__(self, budget: Budget | None = None):
        budget = budget or Budget()
        self._own, self._merged = Kept(budget), Kept(budget)
        self._course: Course | None = None
        self._left: tuple[str, ...] = ()
        self._final = False
        self._key = b""

    def begin(self, own: nn.Module, units: Iterable[Unit], settled: Collection[str], changed: bool) -> None:
        """Tell what is final before a pass: the weights with these names. `changed` says whether some of them are not
        as they were in the last pass."""
        self._left = tuple(name for unit in units if not unit.parameters(own) <= set(settled) for name in unit.modules)
        self._final = bool(settled)  # before the first fit, weights that are only averaged are not final either
        if changed:
            self._own.forget()
            self._merged.forget()

    def enter(self, own: nn.Module, inputs: Any) -> None:
        """Tell the batch that comes next."""
        if self._course is None:
            twin = copy.deepcopy(own)
            remove_all(twin)
            few = subset(inputs, slice(2), examples(inputs))
            with slow_path():
                self._course = course_of(twin, lambda: call(twin, few, devices.of(twin)))
        self._key = key_of(leaves(inputs))

    def own(self, network: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside, the client's own network runs on this batch. The merged one comes after it."""
        if self._own.until(self._key) != self._merged.until(self._key):
            # Corrections of features in one network need the features of the other: both skip the same, or nothing.
            self._own.drop(self._key)
            self._merged.drop(self._key)
        return self._running(self._own, network)

    def merged(self, network: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside, the merged network runs on this batch."""
        return self._running(self._merged, network)

    def _running(self, kept: Kept, network: nn.Module) -> contextlib.AbstractContextManager[None]:
        course = self._course
        assert course is not None  # `enter` comes first
        until = min((course.begins[name] for name in self._left if name in course.begins), default=0)
        return kept.running(network, course, self._key, until if self._final else 0)
