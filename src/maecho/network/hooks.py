"""The only place that looks at a forward pass: what enters and what leaves modules.

No other module registers hooks. So all hooks are removed after their pass, even after an error. Code that runs the
model for another purpose can pause them. They see what their own thread runs: a model that serves requests in another
thread meanwhile shows nothing of them. Compiled modules run eagerly, since hooks see nothing of compiled code.

Torch's fused transformer layers may bypass the watched modules. Enter `attention.slow_path` too if that matters.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from maecho.network import kinds
from maecho.network.plain import eagerly

Before = Callable[[str, nn.Module, Tensor], Tensor | None]
"""Takes a module's name, the module and its input (see `kinds.entering`). Returns another input to put in the place of
the module's first argument, or None."""
After = Callable[[str, nn.Module, Tensor, Tensor], Tensor | None]
"""Takes the same and the output, after the module ran. Returns another output to put in its place, or None."""


class Enough(BaseException):
    """A `Before` or an `After` raises this to end the pass once it has seen enough; see `ending_early`."""


def ending_early() -> contextlib.AbstractContextManager[None]:
    """Inside, `Enough` ends the pass. It is not an error."""
    return contextlib.suppress(Enough)


class Watch:
    """Switches hooks off and on. Several calls of `watching` can share one Watch."""

    def __init__(self) -> None:
        self._paused = False
        self._thread = threading.get_ident()

    @property
    def paused(self) -> bool:
        """Whether hooks do nothing: after `pause`, and in every thread but that in which this was made."""
        return self._paused or threading.get_ident() != self._thread

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, the hooks do nothing. Use it for passes that only test the model."""
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
        model: the model that has the modules.
        names: the names of the modules, as in `named_modules`.
        before: is called with the input. If it returns a tensor, the module gets that one instead.
        after: is called with input and output. If it returns a tensor, that one replaces the output.
        watch: pauses these hooks. Several calls can share one, to be paused together. By default a new one is made.
    """
    shared = watch or Watch()
    with eagerly(), contextlib.ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            if before is not None:
                entering = module.register_forward_pre_hook(_entering(name, before, shared), with_kwargs=True)
                hooks.callback(entering.remove)
            if after is not None:
                leaving = module.register_forward_hook(_leaving(name, after, shared), with_kwargs=True)
                hooks.callback(leaving.remove)
        yield shared


def _entering(name: str, before: Before, watch: Watch) -> Callable[..., Any]:
    # Another thread may call a hook before torch has noted that it takes keywords. There the watch is paused.
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if watch.paused or kwargs is None:
            return None
        x = before(name, module, kinds.entering(module, args, kwargs))
        if x is None:
            return None
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, kinds.keyword(kwargs): x})

    return hook


def _leaving(name: str, after: After, watch: Watch) -> Callable[..., Any]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor | None = None
    ) -> Tensor | None:
        return None if watch.paused or z is None else after(name, module, kinds.entering(module, args, kwargs), z)

    return hook


def remove_all(model: nn.Module) -> None:
    """Remove every hook that would run in a forward pass."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
