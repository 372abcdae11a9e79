"""A relay's passes skip what is final, and nothing else: results are the same, the work grows with the depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.echo.client import RelayClient
from maecho.echo.messages import Question
from maecho.echo.replay import kept
from maecho.echo.replay.course import course_of
from maecho.echo.server import RelayServer
from support.clients import Net, rng


def chain(depth: int) -> nn.Module:
    layers = [layer for _ in range(depth - 1) for layer in (nn.Linear(6, 6), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(6, 3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(self.norm(x)).relu_())


def skipping(net: Any, x: Tensor) -> Tensor:
    early = net.first(x)
    return net.head(net.third(net.second(early.relu()).relu()) + early)


def remembered(net: Any, x: Tensor) -> Tensor:
    """The second block reads what the first has put aside, beside its output."""
    return net.head(net.second(net.first(x)) + net.first.aside)


class Aside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.aside = self.inside(x)
        return self.aside.relu()


def written(net: Any, x: Tensor) -> Tensor:
    """An output is changed in place long after it was given out."""
    early = net.first(x)
    later = net.third(net.second(early).relu())
    early.mul_(2)
    return net.head(later + early)


def branches(net: Any, x: Tensor) -> Tensor:
    """The second branch is of the first stage, and runs after the second stage."""
    return net.head(net.second(net.first(x).relu()) + net.third(x))


def linears(forward: Callable[..., Tensor]) -> nn.Module:
    parts = {name: nn.Linear(6, 6) for name in ("first", "second", "third")}
    return Net(forward, **parts, head=nn.Linear(6, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: chain(6),
    "chain, written in place": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)
    ),
    "blocks": lambda: nn.Sequential(Block(), Block(), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "skipping": lambda: linears(skipping),
    "remembered": lambda: Net(remembered, first=Aside(), second=nn.Linear(6, 6), head=nn.Linear(6, 3)),
    "written": lambda: linears(written),
    "branches": lambda: linears(branches),
    "transformer": lambda: Net(
        lambda net, x: net.head(net.body(x.unflatten(1, (2, 3))).flatten(1)),
        body=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(3, 1, 4, 0, batch_first=True), 2, enable_nested_tensor=False
        ),
        head=nn.Linear(6, 3),
    ),
    "convolutions": lambda: Net(
        lambda net, x: net.head(net.body(x.unflatten(1, (1, 6)))),
        body=nn.Sequential(
            nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU(True), nn.Conv1d(2, 2, 3), nn.Flatten()
        ),
        head=nn.Linear(8, 3),
    ),
}


def clients(name: str, count: int = 2) -> list[tuple[nn.Module, list[tuple[Tensor, Tensor]]]]:
    found = []
    for i in range(count):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            model = NETWORKS[name]()
        draw = rng(i)
        data = [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(3)]
        found.append((model, data))
    return found


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept, so that everything is computed at every stage."""
    monkeypatch.setattr(kept.Budget, "take", lambda budget, size: False)


def results(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results of a relay and of a chain."""
    pairs = clients(name)
    uploads = [
        maecho.make_upload(model, data, f"client {i}", ["moments", "classes", "features"], rank=None, progress=False)
        for i, (model, data) in enumerate(pairs)
    ]
    relayed = maecho.relay(pairs[0][0], pairs, progress=False)
    return relayed, maecho.aggregate(uploads, "echo-chain", model=pairs[0][0], draws=200, chunk=40)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:.*not sent|.*keep their order|.*are averaged")
def test_results_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory = results(name)
    monkeypatch.setattr(kept.Budget, "take", lambda budget, size: False)
    for found, expected in zip(with_memory, results(name), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def runs(name: str, model: nn.Module, data: list[Any]) -> Counter[int]:
    """How often the linear layers of a relay of one client run: sizes of batches -> times."""
    counted: Counter[int] = Counter()
    linear = nn.functional.linear

    def count(x: Tensor, *arguments: Any) -> Tensor:
        counted[len(x)] += 1
        return linear(x, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", count)
        maecho.relay(model, [(model, data)], progress=False)
    return counted


def test_the_work_grows_with_the_depth_and_not_with_its_square() -> None:
    found = []
    for depth in (8, 16):
        torch.manual_seed(0)
        _, data = clients("chain", 1)[0]
        found.append(runs("chain", chain(depth), data)[8])
    assert found[1] <= 2.1 * found[0]  # 3.7 times if every stage runs from the input
    assert found[0] <= 3 * 4 * 8


def test_without_memory_everything_runs(no_memory: None) -> None:
    _, data = clients("chain", 1)[0]
    assert runs("chain", chain(8), data)[8] >= 3 * 8 * 8


def test_batches_in_another_order_are_known() -> None:
    """A loader that shuffles whole batches; one that mixes their examples gives new batches, which are computed."""
    model, data = clients("chain", 1)[0]
    pairs = clients("chain")

    class Turning:
        def __init__(self) -> None:
            self.turn = 0

        def __iter__(self) -> Any:
            self.turn += 1
            return iter(data[self.turn % 3 :] + data[: self.turn % 3])

    found = maecho.relay(model, [(model, Turning()), pairs[1]], progress=False)
    expected = maecho.relay(model, [(model, data), pairs[1]], progress=False)
    assert all(torch.allclose(found[key], tensor, atol=1e-6) for key, tensor in expected.items())


def test_a_question_with_other_weights_is_answered_with_them() -> None:
    """The server may fit a stage again. What the merged network had computed with the old weights is forgotten."""
    pairs = clients("chain")
    relayed = [RelayClient(*pair, f"client {i}") for i, pair in enumerate(pairs)]
    server = RelayServer(pairs[0][0])
    for _ in range(3):
        question = server.broadcast()
        server.collect(client.answer(question) for client in relayed)
    question = server.broadcast()
    relayed[0].answer(question)
    other = {name: 1.5 * tensor for name, tensor in question.weights.items()}
    changed = Question(question.round, units=question.units, head=question.head, weights=other)
    fresh = RelayClient(*pairs[0], "client 0")
    for one, two in zip(relayed[0].answer(changed).totals, fresh.answer(changed).totals, strict=True):
        assert torch.equal(one.gram, two.gram)


def test_the_course_of_a_chain() -> None:
    model = chain(4)
    course = course_of(model, lambda: model(torch.randn(2, 6)))
    skips = course.skips(course.begins["4"])
    assert skips.chains == {"": 3}
    assert skips.needed == {"3": True}


def test_the_course_of_residual_sums() -> None:
    model = linears(skipping)
    course = course_of(model, lambda: model(torch.randn(2, 6)))
    assert course.skips(course.begins["head"]).needed == {"first": True, "second": True, "third": True}
    assert course.skips(course.begins["first"]).needed == {}
    blocks = nn.Sequential(Block(), Block(), nn.Linear(6, 3))
    course = course_of(blocks, lambda: blocks(torch.randn(2, 6)))
    assert course.skips(course.begins["1.two"]).needed == {"0": True, "1.one": True, "1.norm": False}


def test_a_module_that_leaves_more_than_its_output_is_not_skipped() -> None:
    model = Net(remembered, first=Aside(), second=nn.Linear(6, 6), head=nn.Linear(6, 3))
    course = course_of(model, lambda: model(torch.randn(2, 6)))
    assert "first" not in course.ends
