"""Local training is reproducible, does not touch the global generator, and raises an error if it fails."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from maecho.lab.training import LocalTraining


def problem(n: int = 200) -> tuple[Tensor, Tensor]:
    """Two classes that a line nearly separates. Their number is not a multiple of the batch size."""
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] + 0.1 * x[:, 1] > 0).long()


def network(seed: int = 0) -> nn.Sequential:
    rng = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) / 3)
    return model


def trained(seed: int, training: LocalTraining | None = None) -> list[Tensor]:
    model = network()
    (training or LocalTraining(epochs=3))(model, *problem(), torch.Generator().manual_seed(seed))
    return [p.detach() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_the_generator_decides_everything() -> None:
    first = trained(0)
    torch.rand(17)
    assert equal(first, trained(0))
    assert not equal(first, trained(1))


def test_the_generator_decides_dropout_too() -> None:
    """With one batch the order of examples cannot matter: only dropout differs."""
    one_batch = LocalTraining(epochs=1, batch_size=200)
    assert equal(trained(0, one_batch), trained(0, one_batch))
    assert not torch.allclose(trained(0, one_batch)[0], trained(1, one_batch)[0], atol=1e-5)


def test_the_global_generator_is_left_as_it_was() -> None:
    model = network()
    before = torch.random.get_rng_state()
    LocalTraining(epochs=1)(model, *problem(), torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("steps", "examples"), [(1, 64), (3, 192), (4, 200), (5, 264), (8, 400), (11, 592)])
def test_training_stops_after_so_many_batches(steps: int, examples: int) -> None:
    """200 examples in batches of 64 are four batches a pass; the last one is small."""
    model, sizes = network(), list[int]()
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    LocalTraining(epochs=1, batch_size=64, steps=steps)(model, *problem(), torch.Generator().manual_seed(0))
    assert (len(sizes), sum(sizes)) == (steps, examples)


def test_steps_of_whole_passes_are_epochs() -> None:
    by_steps = trained(0, LocalTraining(epochs=9, batch_size=50, steps=8))
    assert equal(by_steps, trained(0, LocalTraining(epochs=2, batch_size=50)))


def test_the_loss_goes_down_and_is_reported_each_epoch() -> None:
    model, seen = network(), list[tuple[int, float]]()
    x, y = problem()
    rng = torch.Generator().manual_seed(0)
    LocalTraining(epochs=30, learning_rate=0.1)(model, x, y, rng, lambda epoch, loss: seen.append((epoch, loss)))
    assert [epoch for epoch, _ in seen] == list(range(1, 31))
    assert seen[-1][1] < seen[0][1] / 2
    assert not model.training
    assert (model(x).argmax(1) == y).float().mean() > 0.95


def test_one_step_is_sgd_on_the_mean_cross_entropy() -> None:
    x, y = problem()
    model = nn.Linear(5, 2, bias=False)
    W = model.weight.detach().clone().requires_grad_()
    reported: list[float] = []
    loss = nn.functional.cross_entropy(x @ W.T, y)
    (gradient,) = torch.autograd.grad(loss, W)
    training = LocalTraining(epochs=1, learning_rate=0.5, batch_size=1000, weight_decay=0.1)
    training(model, x, y, torch.Generator().manual_seed(0), lambda _, value: reported.append(value))
    torch.testing.assert_close(model.weight.detach(), W.detach() - 0.5 * (gradient + 0.1 * W.detach()))
    assert reported == [pytest.approx(loss.item(), rel=1e-5)]


def test_epochs_are_sgd_with_momentum_in_a_new_order_each() -> None:
    """Three epochs of four batches, the last one short, written out: v ← m v + g + λ W,  W ← W − η v."""
    x, y = problem(100)
    model = nn.Linear(5, 2, bias=False)
    W, v = model.weight.detach().clone(), torch.zeros(2, 5)
    rng = torch.Generator().manual_seed(4)
    torch.randint(2**62, (), generator=rng)  # the seed of dropout
    orders = [torch.randperm(100, generator=rng) for _ in range(3)]
    assert len({tuple(order.tolist()) for order in orders}) == 3
    for order in orders:
        for rows in order.split(30):
            outputs = (x[rows] @ W.T).softmax(1)
            gradient = (outputs - nn.functional.one_hot(y[rows], 2)).T @ x[rows] / len(rows)
            v = 0.9 * v + gradient + 0.1 * W
            W = W - 0.2 * v
    training = LocalTraining(epochs=3, learning_rate=0.2, momentum=0.9, batch_size=30, weight_decay=0.1)
    training(model, x, y, torch.Generator().manual_seed(4))
    torch.testing.assert_close(model.weight.detach(), W, rtol=1e-4, atol=1e-5)


def test_the_defaults_are_those_of_the_tables() -> None:
    """Who changes one changes it here too: configs rest on them."""
    expected = "epochs=10, learning_rate=0.01, momentum=0.5, batch_size=64, weight_decay=0.0, steps=None"
    assert repr(LocalTraining()) == f"LocalTraining({expected})"


def test_reported_loss_weighs_the_short_last_batch_by_its_examples() -> None:
    x, y = problem(100)
    model, reported = nn.Linear(5, 2, bias=False), list[float]()
    expected = nn.functional.cross_entropy(model(x), y).item()
    still = LocalTraining(epochs=1, learning_rate=1e-12, batch_size=64)
    still(model, x, y, torch.Generator().manual_seed(0), lambda _, value: reported.append(value))
    assert reported == [pytest.approx(expected, rel=1e-5)]


def test_inputs_and_frozen_parameters_stay_as_they_are() -> None:
    model, (x, y) = network(), problem()
    first = model.get_parameter("0.weight").requires_grad_(False)
    frozen, x_before = first.clone(), x.clone()
    LocalTraining(epochs=1)(model, x, y, torch.Generator().manual_seed(0))
    assert torch.equal(first, frozen)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"epochs": 0}, "LocalTraining: epochs must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "LocalTraining: learning_rate must be positive and finite, got 0.0"),
        ({"learning_rate": float("nan")}, "LocalTraining: learning_rate must be positive and finite, got nan"),
        ({"momentum": 1.0}, "LocalTraining: momentum must lie in [0, 1), got 1.0"),
        ({"batch_size": 0}, "LocalTraining: batch_size must be at least 1, got 0"),
        ({"weight_decay": -1.0}, "LocalTraining: weight_decay must be finite and not negative, got -1.0"),
    ],
)
def test_hyper_parameters_are_checked(hyper: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LocalTraining(**hyper)  # type: ignore[arg-type]


def test_what_is_trained_on_is_checked() -> None:
    train, rng, (x, y) = LocalTraining(epochs=1), torch.Generator(), problem()
    cases = [
        (network(), x, y[:3], "one label an input and at least one, got inputs (200, 5) and labels (3,)"),
        (network(), x[:0], y[:0], "one label an input and at least one, got inputs (0, 5) and labels (0,)"),
        (network(), x, y.float(), "labels must be int64, got torch.float32"),
        (nn.ReLU(), x, y, "ReLU has no parameter that asks for a gradient"),
    ]
    for model, inputs, labels, message in cases:
        with pytest.raises(ValueError, match=re.escape(f"LocalTraining: {message}")):
            train(model, inputs, labels, rng)


def test_a_diverged_loss_is_an_error() -> None:
    x, y = problem()
    message = (
        "LocalTraining: the loss must stay finite, got nan in epoch 1 of 3; lower learning_rate=0.01 or momentum=0.5"
    )
    with pytest.raises(FloatingPointError, match=re.escape(message)):
        LocalTraining(epochs=3)(network(), x * float("nan"), y, torch.Generator())
    with pytest.raises(FloatingPointError, match=r"lower learning_rate=1e\+20"):
        LocalTraining(learning_rate=1e20)(network(), x, y, torch.Generator())
