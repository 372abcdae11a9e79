"""A progress bar for long work. It shows on a terminal only.

The bar needs `rich`. If only the core is installed (torch, numpy, safetensors), there is no bar.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from maecho.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds before a bar appears. Short work shows none."""


@cache
def stderr() -> Console:
    """The console of all bars. They share one, so that a bar inside another is drawn below it."""
    from rich.console import Console

    return Console(stderr=True)


def track(items: Iterable[T], label: str, total: int | None = None, show: bool | None = None) -> Iterator[T]:
    """Pass items on, and show a bar after `PATIENCE` seconds.

    `show` is True, False, or None for a bar only if stderr is a terminal.
    """
    if total is None:
        total = operator.length_hint(items) or None
    if not (sys.stderr.isatty() if show is None else show):
        yield from items
        return
    try:
        from rich.markup import escape
        from rich.progress import Progress
    except ImportError:
        yield from items
        return
    began, task = time.monotonic(), None
    with Progress(console=stderr(), transient=True) as bar:
        for done, item in enumerate(items):
            if task is None and time.monotonic() - began > PATIENCE:
                task = bar.add_task(escape(printable(label)), total=total, completed=done)
            yield item
            if task is not None:
                bar.advance(task)
