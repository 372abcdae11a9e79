"""A bar for work that takes long, on a terminal and nowhere else.

`rich` is imported here alone; where only the core is installed (torch, numpy, safetensors) there is no bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from maecho.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds before a bar appears: short work stays silent."""


@cache
def stderr() -> Console:
    """One for all bars: those inside others then stand below them."""
    from rich.console import Console

    return Console(stderr=True)


def track(items: Iterable[T], label: str, total: int | None = None, show: bool | None = None) -> Iterator[T]:
    """Pass items on; show a bar once it has taken `PATIENCE` seconds. `show` None: only if stderr is a terminal."""
    if total is None and isinstance(items, Sized):
        total = len(items)
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
