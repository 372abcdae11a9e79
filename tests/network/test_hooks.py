"""A watched pass shows every call, and no hook stays behind."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.network.hooks import Enough, Watch, ending_early, watching
from support.clients import network, rng

SOURCES = Path(maecho.__file__).parent
X = torch.randn(3, 12, generator=rng())


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def attributes(path: Path) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def test_no_other_module_registers_a_hook() -> None:
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if any(re.fullmatch(r"register_\w*hook", name) for name in attributes(path))
    }
    assert found == {"network/hooks.py"}


def test_what_enters_and_what_leaves_is_shown_in_order() -> None:
    model, seen = network(), []

    def before(name: str, module: nn.Module, x: Tensor) -> None:
        assert module is model.get_submodule(name)
        seen.append((name, x))

    def after(name: str, module: nn.Module, x: Tensor, z: Tensor) -> None:
        assert x is seen[-1][1]
        seen.append((f"after {name}", z))

    with watching(model, ["2", "0"], before, after):
        model(X)
    assert [name for name, _ in seen] == ["0", "after 0", "2", "after 2"]
    assert seen[0][1] is X
    assert torch.equal(seen[3][1], model[:3](X))
    model(X)
    assert len(seen) == 4, "nothing is shown afterwards"


def test_what_is_returned_takes_the_place() -> None:
    model = network()
    with watching(model, ["2"], before=lambda name, module, x: x * 0):
        torch.testing.assert_close(model(X), model[2:](torch.zeros(3, 9)))
    h = model[:2](X)
    expected = model[3:](model[2](h) + h[:, :7])
    with watching(model, ["2"], after=lambda name, module, x, z: z + x[:, :7]):
        torch.testing.assert_close(model(X), expected)


class Named(nn.Module):
    """A module that takes its input as a keyword argument."""

    def forward(self, *, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return scale * hidden


@pytest.mark.parametrize(("module", "key"), [(nn.Linear(12, 2), "input"), (Named(), "hidden")])
def test_the_input_may_be_given_by_name(module: nn.Module, key: str) -> None:
    seen: list[Tensor] = []

    def before(name: str, module: nn.Module, x: Tensor) -> Tensor:
        seen.append(x)
        return 2 * x

    with watching(module, [""], before):
        doubled = module(**{key: X})
    assert seen[0] is X
    torch.testing.assert_close(doubled, module(**{key: 2 * X}))


def test_nothing_stays_behind_after_an_error() -> None:
    model = network()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watching(model, ["0", "2"], fail, fail):
        model(X)
    with pytest.raises(AttributeError), watching(model, ["0", "no such module"], fail):
        pass
    assert not hooks(model)


def test_a_pass_that_has_seen_enough_ends() -> None:
    model, seen = network(), []

    def before(name: str, module: nn.Module, x: Tensor) -> None:
        seen.append(name)
        if name == "2":
            raise Enough

    with ending_early(), watching(model, ["0", "2", "4"], before):
        model(X)
        pytest.fail("the pass must end")
    assert seen == ["0", "2"]
    assert not hooks(model)


def test_paused_hooks_do_nothing_and_several_can_share_a_watch() -> None:
    model, other, seen = network(), network(1), []

    def before(name: str, module: nn.Module, x: Tensor) -> Tensor:
        seen.append(name)
        return x * 0

    def after(name: str, module: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        seen.append(name)
        return z * 0

    expected = model(X)
    with watching(model, ["0"], before) as watch, watching(other, ["2"], after=after, watch=watch) as same:
        assert same is watch
        with watch.pause():
            assert watch.paused
            with watch.pause():
                pass
            assert watch.paused, "until the outer pause ends"
            assert torch.equal(model(X), expected)
            other(X)
        assert not watch.paused
        assert seen == []
        with pytest.raises(ZeroDivisionError), watch.pause():
            raise ZeroDivisionError
        model(X)
        other(X)
    assert seen == ["0", "2"]


def test_hooks_of_another_watch_go_on_while_one_is_paused() -> None:
    """So code inside a watched pass can run the model with other hooks, unseen by the outer watch."""
    model, seen = network(), []

    def look(who: str) -> Any:
        return lambda name, module, x: seen.append(who)

    with watching(model, ["0"], look("outer")) as watch, watch.pause(), watching(model, ["0"], look("inner")):
        model(X)
    assert seen == ["inner"]
    assert not Watch().paused
