"""The parts of DENSE: generated inputs of every shape, the clients as one teacher, and the losses by their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from maecho.errors import InputError
from maecho.synthesis import generator
from maecho.synthesis.generator import (
    NOISE,
    Generator,
    Standardised,
    Teachers,
    batchnorm_distance,
    boundary_support,
    divergence,
    logits,
)
from support.clients import Net, network, rng


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 7, 9), (2, 1, 1), (12,), (4, 5), (2, 3, 4, 5)])
def test_inputs_of_every_shape_are_generated(shape: tuple[int, ...]) -> None:
    one = Generator(shape, 4, nn.Identity(), rng())
    x = one(torch.randn(5, NOISE, generator=rng()))
    assert x.shape == (5, *shape)
    x.sum().backward()
    assert all(p.grad is not None for p in one.parameters())


def test_images_come_from_convolutions_and_others_from_an_mlp() -> None:
    kinds = [{type(layer) for layer in Generator(s, 4, nn.Identity(), rng()).layers} for s in ((1, 8, 8), (64,))]
    assert nn.Conv2d in kinds[0]
    assert nn.Conv2d not in kinds[1]
    image = Generator((3, 10, 13), 4, nn.Identity(), rng()).layers
    assert [layer.size for layer in image if isinstance(layer, nn.Upsample)] == [(5, 7), (10, 13)]
    assert image[0].out_features == 2 * 4 * 3 * 4
    assert Generator((64,), 4, nn.Identity(), rng()).layers[0].out_features == 32


def test_the_initial_weights_come_from_the_generator_given() -> None:
    one, same, other = (Generator((1, 8, 8), 16, nn.Identity(), rng(seed)) for seed in (0, 0, 1))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c) or a.dim() == 1
    weight = one.layers[0].weight.detach()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    assert abs(float(weight.mean())) < 1e-3
    assert not one.layers[0].bias.any()


def test_the_output_module_has_the_last_word() -> None:
    z = torch.randn(6, NOISE, generator=rng())
    x = Generator((1, 8, 8), 4, nn.Sigmoid(), rng())(z).detach()
    assert 0 < float(x.min()) < float(x.max()) < 1


def test_standardised_inputs_have_the_reported_mean_and_spread() -> None:
    x = 5 + 3 * torch.randn(400, 2, 6, 6, generator=rng())
    plain = Standardised((2, 6, 6))(x)
    torch.testing.assert_close(plain.mean((0, 2, 3)), torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(plain.std((0, 2, 3)), torch.ones(2), rtol=0, atol=1e-3)
    mean, spread = torch.arange(72.0), torch.linspace(0.5, 2, 72)
    found = Standardised((2, 6, 6), (mean, spread))(x).flatten(1)
    torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.std(0, correction=0), spread, rtol=1e-3, atol=0)
    assert Standardised(())(torch.randn(7, generator=rng())).shape == (7,)


def models() -> list[nn.Module]:
    return [network(seed) for seed in range(3)]


def test_the_teacher_is_the_mean_of_logits_or_of_probabilities() -> None:
    x = torch.randn(8, 12, generator=rng())
    each = torch.stack([model(x) for model in models()])
    found, distance = Teachers(models())(x)
    torch.testing.assert_close(found, each.mean(0))
    assert float(distance) == 0
    by_probabilities, _ = Teachers(models(), "probabilities")(x)
    torch.testing.assert_close(by_probabilities.exp(), each.softmax(-1).mean(0))


def normed(seed: int, tracked: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = nn.BatchNorm2d(3, track_running_stats=tracked)
        if tracked:
            norm.running_mean, norm.running_var = torch.randn(3), torch.rand(3) + 0.5
        return Net(lambda net, x: net.head(net.norm(x).mean((2, 3))), norm=norm, head=nn.Linear(3, 4))


def test_the_distance_of_batchnorms_is_the_mean_over_clients() -> None:
    x = 2 * torch.randn(8, 3, 5, 5, generator=rng()) - 1
    expected = []
    for seed in range(2):
        norm = normed(seed).norm
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        expected.append((mean - norm.running_mean).norm() + (var - norm.running_var).norm())
        torch.testing.assert_close(batchnorm_distance(x, norm), expected[-1])
    clients = [normed(0), normed(1)]
    _, distance = Teachers(clients)(x)
    torch.testing.assert_close(distance, torch.stack(expected).mean())
    # A norm that holds no statistics cannot be compared with.
    assert float(Teachers([normed(0, tracked=False)])(x)[1]) == 0


def test_teachers_are_frozen_and_in_evaluation_mode() -> None:
    one = normed(0).train()
    x = torch.randn(4, 3, 5, 5, generator=rng()).requires_grad_()
    before = one.norm.running_mean.clone()
    out, distance = Teachers([one])(x)
    (out.sum() + distance).backward()
    assert not one.training
    assert torch.equal(one.norm.running_mean, before)
    assert all(not p.requires_grad and p.grad is None for p in one.parameters())
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_divergence_is_its_formula(temperature: float) -> None:
    teacher, student = torch.randn(2, 6, 5, generator=rng(), dtype=torch.float64)
    p, q = (teacher / temperature).softmax(1), (student / temperature).softmax(1)
    expected = temperature**2 * (p * (p / q).log()).sum(1)
    torch.testing.assert_close(divergence(teacher, student, temperature), expected)
    torch.testing.assert_close(divergence(teacher, teacher), torch.zeros(6).double())


def test_the_boundary_counts_inputs_on_which_teacher_and_student_differ() -> None:
    teacher, student = torch.randn(2, 40, 3, generator=rng(), dtype=torch.float64)
    each = divergence(teacher, student)
    expected = -sum(float(d) for d, t, s in zip(each, teacher, student, strict=True) if t.argmax() != s.argmax()) / 40
    assert expected < 0
    assert float(boundary_support(teacher, student)) == pytest.approx(expected)
    assert float(boundary_support(teacher, 2 * teacher)) == 0


def outputs(value: object) -> nn.Module:
    return Net(lambda net, x: value)


def test_the_first_output_of_several_counts() -> None:
    x, y = torch.randn(4, 3, generator=rng()), torch.ones(4, 2)
    for made in (y, (y, "more"), [y]):
        assert torch.equal(logits(outputs(made), x), y)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (torch.ones(4), r"for each class and each of 4 inputs, got \(4,\)"),
        (torch.ones(3, 2), r"got \(3, 2\)"),
        (torch.ones(4, 2, 1), r"got \(4, 2, 1\)"),
        ({"features": torch.ones(4, 2)}, "got dict"),
        (None, "got NoneType"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(made: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        logits(outputs(made), torch.zeros(4, 3))


def test_a_model_that_cannot_take_the_inputs_is_named_in_one_sentence() -> None:
    with pytest.raises(InputError, match=r"must take float32 inputs \(4, 3\), got an error: mat1 and mat2") as caught:
        logits(nn.Linear(2, 2), torch.zeros(4, 3))
    assert "\n" not in str(caught.value)


def test_the_noise_is_as_long_as_in_the_release() -> None:
    assert generator.NOISE == 256


def test_a_teacher_of_one_client_is_that_client() -> None:
    x: Tensor = torch.randn(3, 12, generator=rng())
    one = network(4)
    torch.testing.assert_close(Teachers([one], "probabilities")(x)[0], one(x).log_softmax(-1))
