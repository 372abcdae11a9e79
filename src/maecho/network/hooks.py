"""The one way to look at a forward pass: what enters and what leaves named modules.

Nobody else registers a hook. So the hooks are gone after every pass, an error included, and whoever runs the model for
a purpose of its own can make the others look away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Before = Callable[[str, nn.Module, Tensor], Tensor | None]
"""Given a module's name, the module and its input: another input, or None to leave it."""
After = Callable[[str, nn.Module, Tensor, Tensor], Tensor | None]
"""The same after the module ran, with its output as well: another output, or None to leave it."""


class Enough(BaseException):
    """Raised by a hook that has seen all it wants; `ending_early` ends the pass there without an error."""


def ending_early() -> contextlib.AbstractContextManager[None]:
    """Inside, a pass may be ended by `Enough`."""
    return contextlib.suppress(Enough)


class Watch:
    """A pass that is being looked at."""

    def __init__(self) -> None:
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, the hooks do nothing: what runs through the model is no data."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


@contextlib.contextmanager
def watching(
    model: nn.Module,
    names: Iterable[str],
    before: Before | None = None,
    after: After | None = None,
    *,
    watch: Watch | None = None,
) -> Iterator[Watch]:
    """Inside, `before` and `after` are called whenever one of the named modules runs.

    Args:
        model: whose modules are named, as `named_modules` does.
        names: of the modules.
        before: called with what enters; what it returns enters instead.
        after: called with what enters and what leaves; what it returns leaves instead.
        watch: one that other hooks share, so that all are paused together.
    """
    shared = watch or Watch()
    handles = []
    try:
        for name in names:
            module = model.get_submodule(name)
            if before is not None:
                handles.append(module.register_forward_pre_hook(_entering(name, before, shared), with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(_leaving(name, after, shared), with_kwargs=True))
        yield shared
    finally:
        for handle in handles:
            handle.remove()


def _entering(name: str, before: Before, watch: Watch) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if watch.paused:
            return None
        x = before(name, module, _input(args, kwargs))
        if x is None:
            return None
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})

    return hook


def _leaving(name: str, after: After, watch: Watch) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor | None:
        return None if watch.paused else after(name, module, _input(args, kwargs), z)

    return hook


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a layer multiplies: its first argument, or the one that torch calls `input`."""
    x: Tensor = args[0] if args else kwargs["input"]
    return x
