"""Training side by side gives what training one by one gives, whatever the network, the loss and the correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho.rounds import LOSSES, Correction, Local
from maecho.rounds.training.one_by_one import train_one
from maecho.rounds.training.side_by_side import train_together, why_not, worth_it
from maecho.rounds.training.span import InSpan, first_linear
from maecho.rounds.training.stack import Stack, Work
from support.clients import rng


def mlp(inputs: int = 20) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))


class Branching(nn.Module):
    """A residual sum, a norm, and a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out, self.gain = (
            nn.Linear(20, 20),
            nn.LayerNorm(20),
            nn.Linear(20, 4),
            nn.Parameter(torch.ones(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.inner(x).relu())) * self.gain


def reused() -> nn.Sequential:
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(20, 6), relu, nn.Linear(6, 6), relu, nn.Linear(6, 4))


def tied() -> nn.Sequential:
    layer = nn.Linear(20, 20)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(20, 4))


def cnn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 4))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (20,)),
    "mlp without biases": (lambda: nn.Sequential(nn.Linear(20, 6, bias=False), nn.ReLU(), nn.Linear(6, 4)), (20,)),
    "one layer": (lambda: nn.Sequential(nn.Linear(20, 4)), (20,)),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), *mlp()), (4, 5)),
    "rows that are no examples": (lambda: nn.Sequential(nn.Linear(5, 3), nn.Flatten(), nn.Linear(12, 4)), (4, 5)),
    "cnn": (cnn, (1, 4, 4)),
    "branching": (Branching, (20,)),
    "one module used twice": (reused, (20,)),
    "a norm behind the first layer": (lambda: nn.Sequential(nn.Linear(20, 6), nn.LayerNorm(6), nn.Linear(6, 4)), (20,)),
    "activations in place": (lambda: nn.Sequential(nn.Linear(20, 6), nn.ELU(inplace=True), nn.Linear(6, 6),
                                                   nn.ReLU(True), nn.Linear(6, 4, bias=False)), (20,)),
}  # fmt: skip
SIZES = {"whole batches": (5, 6, 4, 2), "many batches": (5, 19, 12, 8), "batches of one": (17, 9, 1),
         "more examples than inputs": (25, 7)}  # fmt: skip


def made(name: str) -> tuple[nn.Module, dict[str, Tensor], tuple[int, ...]]:
    make, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
    return model, {key: tensor.clone() for key, tensor in model.state_dict().items()}, shape


def works(start: dict[str, Tensor], shape: tuple[int, ...], sizes: tuple[int, ...], corrected: bool) -> list[Work]:
    found = []
    for i, n in enumerate(sizes):
        draw = rng(i)
        x = torch.randn(n, *shape, generator=draw, dtype=torch.float64)
        y = torch.randint(0, 3, (n,), generator=draw)
        offset = {key: 0.05 * torch.randn(t.shape, generator=draw, dtype=torch.float64) for key, t in start.items()}
        # The first client has no offset, the second no pull.
        correction = Correction(0.3 * (i != 1), offset if i else None) if corrected else Correction()
        found.append(Work(x, y, correction, i))
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("corrected", [False, True])
def test_together_as_one_by_one(name: str, sizes: tuple[int, ...], corrected: bool) -> None:
    model, start, shape = made(name)
    todo = works(start, shape, sizes, corrected)
    for clip in (None, 0.2):
        local = Local(epochs=3, learning_rate=0.1, batch_size=8, clip=clip)
        alone = [train_one(model, start, w.x, w.y, local, w.correction, w.seed) for w in todo]
        for one, other in zip(train_together(model, start, todo, local), alone, strict=True):
            same(one, other)
        assert all(float((one[key] - t).abs().max()) > 1e-3 for one in alone for key, t in start.items() if t.dim() > 1)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["mlp", "branching"])
def test_every_loss(loss: str, name: str) -> None:
    model, start, shape = made(name)
    todo = works(start, shape, SIZES["many batches"], False)
    local = Local(epochs=2, learning_rate=0.1, batch_size=8, loss=LOSSES[loss])
    for work, one in zip(todo, train_together(model, start, todo, local), strict=True):
        same(one, train_one(model, start, work.x, work.y, local, work.correction, work.seed))


def test_the_first_layer_stays_in_the_span_where_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[type] = []
    train = Stack.train
    monkeypatch.setattr(Stack, "train", lambda self: (used.append(type(self)), train(self))[1])
    model, start, shape = made("mlp")
    for sizes in ((5, 20), (5, 21)):
        train_together(model, start, works(start, shape, sizes, False), Local(epochs=1))
    assert used == [InSpan, Stack]


def test_where_training_together_is_worth_it() -> None:
    """A small network always; a large one if its first layer can stay in the span of the examples."""

    def wide(*shape: int) -> list[Work]:
        return [Work(torch.zeros(n, *shape), torch.zeros(n, dtype=torch.int64), Correction(), 0) for n in (40, 60)]

    large = nn.Sequential(nn.Linear(700, 1000), nn.ReLU(), nn.Linear(1000, 4))
    assert worth_it(large, wide(700))
    assert not worth_it(large, [*wide(700), Work(torch.zeros(701, 700), torch.zeros(701).long(), Correction(), 0)])
    assert not worth_it(nn.Sequential(nn.ReLU(), *large), wide(700))
    assert worth_it(nn.Sequential(nn.ReLU(), nn.Linear(700, 4)), wide(700))


def test_which_layer_reads_the_inputs() -> None:
    flat, image = torch.zeros(2, 20), torch.zeros(2, 4, 5)
    assert first_linear(mlp(), flat) == "0"
    assert first_linear(nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(20, 2)), image) == "2"
    for other in (
        Branching(),
        nn.Sequential(nn.ReLU(), nn.Linear(20, 2)),
        nn.Sequential(nn.Flatten(0, 1), nn.Linear(5, 2)),
    ):
        assert first_linear(other, flat) is None
    assert first_linear(nn.Sequential(nn.Linear(5, 2)), image) is None
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    assert first_linear(frozen, flat) is None


def test_frozen_parts_stay() -> None:
    model, start, shape = made("mlp")
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    todo = works(start, shape, (5, 6), False)
    for work, one in zip(todo, train_together(model, start, todo, Local(learning_rate=0.1)), strict=True):
        same(one, train_one(model, start, work.x, work.y, Local(learning_rate=0.1), work.correction, work.seed))
        assert torch.equal(one["0.bias"], start["0.bias"])
        assert torch.equal(one["2.weight"], start["2.weight"])
        assert not torch.equal(one["0.weight"], start["0.weight"])


@pytest.mark.parametrize(
    ("layer", "part"),
    [
        (nn.BatchNorm1d(20), "'1' is a BatchNorm1d"),
        (nn.Dropout(0.1), "'1' is a Dropout"),
        (nn.Dropout(0.0), ""),
        (nn.LayerNorm(20), ""),
        (nn.MultiheadAttention(20, 2, dropout=0.1), "'1' has dropout"),
    ],
)
def test_what_cannot_be_trained_side_by_side(layer: nn.Module, part: str) -> None:
    assert why_not(nn.Sequential(nn.Linear(20, 20), layer)) == part


def test_tied_weights_are_trained_one_by_one() -> None:
    assert why_not(tied()) == "'2.weight' is tied to '0.weight'"


def test_one_by_one_is_plain_sgd() -> None:
    """Written out with torch's own optimiser, on the batches that the settings give."""
    model, start, shape = made("mlp")
    (work,) = works(start, shape, (19,), False)
    local = Local(epochs=2, learning_rate=0.1, momentum=0.5, batch_size=8)
    got = train_one(model, start, work.x, work.y, local, work.correction, 7)
    other, _, _ = made("mlp")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    steps = local.batches(19, torch.Generator().manual_seed(7))
    assert [sorted(torch.cat(steps[k : k + 3]).tolist()) for k in (0, 3)] == [list(range(19))] * 2
    for batch in steps:
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(work.x[batch]), work.y[batch]).backward()
        optimizer.step()
    same(got, dict(other.state_dict()))


def test_effective_steps() -> None:
    """Σ over steps of the weight with which a step's gradient counts in the end, by a run on a constant gradient."""
    for momentum in (0.0, 0.5, 0.9):
        local = Local(epochs=3, momentum=momentum, batch_size=4)
        assert local.steps(10) == 9
        velocity = moved = 0.0
        for _ in range(9):
            velocity = momentum * velocity + 1
            moved += velocity
        assert local.effective_steps(10) == pytest.approx(moved)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"epochs": 0}, "epochs must be a whole number, at least 1, got 0"),
        ({"learning_rate": 0}, "learning_rate must be positive and finite, got 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, at least 1, got 2.5"),
        ({"clip": -1}, "clip must be positive and finite, got -1"),
    ],
)
def test_bad_settings(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Local(**options)
