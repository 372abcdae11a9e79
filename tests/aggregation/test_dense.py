"""DENSE: its losses on hand-made cases, its generator on every shape, a student that comes close to the ensemble."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.aggregation import DENSE, choose, dense
from maecho.errors import InputError
from maecho.lab import data, networks, partition
from maecho.lab.training import LocalTraining
from maecho.synthesis.generator import (
    Generator,
    Standardised,
    Teachers,
    batchnorm_distance,
    boundary_support,
    divergence,
)
from support.clients import clients, rng
from support.clients import network as small_network
from support.tiny import QUICK, refused

TINY = QUICK["dense"]


def merge(**options: Any) -> maecho.Merged:
    return maecho.aggregate(clients(2), "dense", **{**TINY, "model": small_network(), **options})


def normed(seed: int) -> nn.Sequential:
    """A CNN with BatchNorm and dropout for 8x8 digits."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = (nn.Conv2d(1, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
        return nn.Sequential(*body, nn.Linear(54, 10))


@cache
def digit_clients(kind: str) -> tuple[list[maecho.Upload], list[nn.Module]]:
    digits = data.digits()
    parts = partition.dirichlet(digits.y_train.numpy(), clients=3, beta=0.5, rng=np.random.default_rng(0))
    uploads, models = [], []
    for i, part in enumerate(parts):
        x, y = digits.x_train[part], digits.y_train[part]
        model = networks.build("digits-mlp", rng()) if kind == "mlp" else normed(0)
        LocalTraining(epochs=20, learning_rate=0.05, batch_size=16)(model, x, y, rng(i))
        uploads.append(maecho.make_upload(model, data.batches(x, y), f"client-{i}", ["moments"]))
        models.append(model)
    return uploads, models


def accuracy(model: nn.Module) -> float:
    digits = data.digits()
    return maecho.evaluate(model, data.batches(digits.x_test, digits.y_test, 500)).accuracy


@pytest.mark.slow
@pytest.mark.parametrize("by", ["logits", "probabilities"])
def test_the_student_comes_close_to_the_ensemble(by: Any) -> None:
    uploads, models = digit_clients("mlp")
    student = networks.build("digits-mlp", rng())
    student.load_state_dict(maecho.aggregate(uploads, "dense", model=student, ensemble=by, epochs=10, device="cpu"))
    average = networks.build("digits-mlp", rng())
    average.load_state_dict(maecho.aggregate(uploads, "fedavg", model=average))
    ensemble = accuracy(maecho.Ensemble(models, by))
    assert accuracy(student) > ensemble - 0.1
    assert accuracy(student) > accuracy(average)


@pytest.mark.slow
def test_a_student_with_batchnorm_learns_from_a_random_start_without_moments() -> None:
    """The student's running statistics are its own, and it works in evaluation mode."""
    uploads, _ = digit_clients("normed")
    student = normed(1)
    budget: dict[str, Any] = {"epochs": 10, "start": "random", "input_shape": (1, 8, 8), "device": "cpu"}
    merged = maecho.aggregate(uploads, "dense", model=student, **budget)
    student.load_state_dict(merged)
    assert accuracy(student) > 0.65
    assert int(merged["1.num_batches_tracked"]) == 10 * DENSE().student_steps
    assert merged.averaged == ()


def test_the_seed_decides_everything_and_nothing_global_changes() -> None:
    uploads, _ = digit_clients("normed")
    skeleton = normed(0)
    before, modes = copy.deepcopy(skeleton.state_dict()), [m.training for m in skeleton.modules()]
    state = torch.get_rng_state()
    one, same, other = (
        maecho.aggregate(uploads, "dense", **TINY, model=skeleton, start="random", seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["5.weight"], other["5.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in skeleton.state_dict().items())
    assert [m.training for m in skeleton.modules()] == modes
    assert all(p.requires_grad for p in skeleton.parameters())


def test_a_random_start_is_that_of_the_seed() -> None:
    """With a learning rate near 0 the student ends where it started."""
    still: dict[str, Any] = {"start": "random", "learning_rate": 1e-12, "student_steps": 1, "device": "cpu"}
    one, same, other = (merge(**still, seed=seed)["0.weight"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert float((one - other).norm() / one.norm()) > 0.5


def test_what_was_not_trained_is_named_as_averaged() -> None:
    skeleton = small_network()
    skeleton[0].requires_grad_(False)
    merged = merge(model=skeleton)
    assert merged.averaged == ("0.weight", "0.bias")
    close_to = maecho.aggregate(clients(2), "fedavg")
    torch.testing.assert_close(merged["0.weight"], close_to["0.weight"])
    assert merged.recipe["seconds"] > 0
    assert "model" not in merged.recipe["options"]


def test_other_methods_ignore_the_model() -> None:
    plain, given = (maecho.aggregate(clients(2), "fedavg", model=model) for model in (None, small_network()))
    assert all(torch.equal(plain[name], given[name]) for name in plain)
    assert choose("fedavg", model=small_network()) == choose("fedavg")


def test_batchnorm_distance_by_hand() -> None:
    norm = nn.BatchNorm2d(2)
    norm.running_mean, norm.running_var = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 4.0])
    x = torch.tensor([[1.0, 3.0], [3.0, 3.0]]).reshape(2, 2, 1, 1)  # means 2 and 3, variances 1 and 0
    assert float(batchnorm_distance(x, norm)) == pytest.approx((1 + 9) ** 0.5 + 4)
    flat = nn.BatchNorm1d(2)
    flat.running_mean, flat.running_var = norm.running_mean, norm.running_var
    assert float(batchnorm_distance(x.flatten(1), flat)) == pytest.approx((1 + 9) ** 0.5 + 4)


def test_batchnorm_loss_is_the_clients_mean_where_there_is_batchnorm() -> None:
    norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    norms[1].running_mean = torch.full((3,), 2.0)
    x = torch.randn(20, 3, generator=rng())
    teachers = Teachers(norms)
    distance, again = teachers(x)[1], teachers(x)[1]
    assert torch.equal(distance, again)  # nothing is left over from the first call
    assert not any(norm._forward_pre_hooks for norm in norms)
    torch.testing.assert_close(distance, sum(batchnorm_distance(x, norm) for norm in norms) / 2)  # type: ignore[arg-type]
    for without in (nn.Linear(3, 2), nn.BatchNorm1d(3, track_running_stats=False)):
        assert float(Teachers([without])(x)[1]) == 0


def test_batchnorm_loss_draws_the_inputs_to_what_the_clients_saw() -> None:
    norm = nn.BatchNorm1d(4)
    norm.running_mean, norm.running_var = torch.full((4,), 3.0), torch.full((4,), 4.0)
    client = nn.Sequential(norm, nn.Linear(4, 2)).eval()
    found = []
    for weight in (0.0, 1.0):
        method, draw = DENSE(generator_steps=60, batch_size=64, batchnorm=weight), rng()
        generator = Generator((4,), 4, nn.Identity(), draw)
        x = method._synthesise(generator, client, Teachers([copy.deepcopy(client)]), draw)
        found.append(float(batchnorm_distance(x, norm)))
    assert found[1] < 0.8 * found[0]


def test_boundary_support_counts_only_where_the_two_decide_differently() -> None:
    teacher = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    student = torch.tensor([[0.5, 0.0], [1.0, 0.0], [0.0, 1.0]])  # agrees, differs, differs
    each = divergence(teacher, student)
    assert float(each[0]) > 0
    torch.testing.assert_close(boundary_support(teacher, student), -(each[1] + each[2]) / 3)
    assert float(boundary_support(teacher, teacher * 0.1)) == 0


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close(divergence(p.log(), q.log())[0], expected)
    torch.testing.assert_close(divergence(2 * p.log(), 2 * q.log(), temperature=2)[0], 4 * expected)


def test_the_generator_seeks_inputs_on_which_student_and_teacher_differ() -> None:
    """Stage 1 lowers the boundary-support loss by its weight: inputs end where the two decide differently."""
    student, client = (nn.Sequential(nn.Linear(4, 3)) for _ in range(2))
    with torch.no_grad():
        for seed, model in enumerate((student, client)):
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=rng(seed)))
    teachers, found = Teachers([client]), []
    for weight in (0.0, 2.0, 10.0):
        method, draw = DENSE(generator_steps=60, batch_size=64, boundary=weight), rng()
        generator = Generator((4,), 4, nn.Tanh(), draw)
        x = method._synthesise(generator, student, teachers, draw)
        with torch.no_grad():
            found.append(float(boundary_support(teachers(x)[0], student(x))))
    assert found[2] < 1.25 * found[0] < 0, found
    assert len(set(found)) == 3, "each weight has its own result"


@pytest.mark.parametrize("temperature", [1.0, 4.0, 20.0])
def test_one_step_of_the_student_by_hand(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """All inputs are one x, so that every batch has the gradient T (q − p) xᵀ with p and q at temperature T."""
    draw = rng(3)
    x = torch.randn(1, 4, generator=draw)
    student, client = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        for model in (student, client):
            model.weight.copy_(torch.randn(3, 4, generator=draw))
    q, p = ((model(x)[0] / temperature).softmax(0).detach() for model in (student, client))
    before = student.weight.detach().clone()
    gradient = temperature * torch.outer(q - p, x[0])
    assert 0.1 < float(gradient.norm()) < dense.LARGEST_GRADIENT
    monkeypatch.setattr(DENSE, "_synthesise", lambda *_: x.repeat(8, 1))
    method = DENSE(epochs=1, student_steps=1, batch_size=8, learning_rate=0.1, temperature=temperature)
    method._train(student, Teachers([client]), (4,), nn.Identity())
    torch.testing.assert_close(student.weight.detach(), before - 0.1 * gradient)


def test_the_teachers_are_the_ensemble() -> None:
    models = [small_network(i) for i in range(3)]
    x = torch.randn(6, 12, generator=rng())
    torch.testing.assert_close(Teachers(models)(x)[0], maecho.Ensemble(models, "logits")(x))
    torch.testing.assert_close(Teachers(models, "probabilities")(x)[0].exp(), maecho.Ensemble(models)(x))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 5, 7), (1, 1, 1), (12,), (2, 9), ()])
def test_the_generator_makes_inputs_of_every_shape(shape: tuple[int, ...]) -> None:
    z = torch.randn(16, 256, generator=rng())
    x = Generator(shape, 4, Standardised(shape), rng())(z)
    assert x.shape == (16, *shape)
    per_channel = x.detach().reshape(16, shape[0] if shape else 1, -1).transpose(0, 1).flatten(1)
    torch.testing.assert_close(per_channel.mean(1), torch.zeros(len(per_channel)), atol=1e-4, rtol=0)
    assert float(per_channel.std(1, correction=0).min()) > 0.9 or shape == (1, 1, 1)
    x = Generator(shape, 4, nn.Sigmoid(), rng())(z)
    assert float(x.detach().min()) >= 0
    assert float(x.detach().max()) <= 1


def test_inputs_have_the_clients_own_mean_and_spread() -> None:
    """Mean and spread are pooled over clients and classes for each pixel. A constant pixel stays constant."""
    draw = rng()
    parts = [torch.randn(n, 2, 3, generator=draw, dtype=torch.float64) * 3 + n for n in (20, 30)]
    for part in parts:
        part[:, 0, 0] = 7
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2)).double()
    labels = [torch.arange(len(part)) % 2 for part in parts]
    uploads = [
        maecho.make_upload(model, [(x, y)], f"{i}", ["moments"], rank=None)
        for i, (x, y) in enumerate(zip(parts, labels, strict=True))
    ]
    mean, spread = dense._pooled(uploads)
    everything = torch.cat(parts).flatten(1)
    torch.testing.assert_close(mean, everything.mean(0))
    torch.testing.assert_close(spread, everything.std(0, correction=0), atol=1e-6, rtol=1e-6)
    x = Standardised((2, 3), (mean, spread))(torch.randn(500, 2, 3, generator=draw, dtype=torch.float64))
    torch.testing.assert_close(x.flatten(1).mean(0), mean)
    torch.testing.assert_close(x.flatten(1).std(0, correction=0), spread, atol=1e-3, rtol=1e-3)


def test_dense_needs_moments_unless_the_shape_of_inputs_is_given() -> None:
    assert DENSE().needs == DENSE(scale="unit").needs == DENSE(scale="moments", input_shape=(4,)).needs == {"moments"}
    assert DENSE(input_shape=(4,)).needs == DENSE(input_shape=(4,), scale="unit").needs == set()
    bare = [maecho.make_upload(small_network(i), [torch.ones(3, 12)], f"{i}", []) for i in range(2)]
    for scale in ("standard", "unit"):
        merged = maecho.aggregate(bare, "dense", **TINY, model=small_network(), input_shape=[12], scale=scale)
        assert all(tensor.isfinite().all() for tensor in merged.values())
    with refused("0", "dense needs the statistic 'moments'", "none"):
        maecho.aggregate(bare, "dense", model=small_network())


class Giving(nn.Sequential):
    """The small network with its outputs in another form."""

    def __init__(self, form: str):
        super().__init__(*small_network())
        self.form = form

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"dict": {"logits": out}, "one number": out.sum(), "tuple": (out, None)}[self.form]


def test_a_skeleton_that_does_not_fit_is_refused() -> None:
    with refused("dense", "model must be the network", "got none", "model=network", error=InputError):
        merge(model=None)
    with refused("dense", "9x12 for '0.weight'", "client-0", "got 8x12", error=InputError):
        merge(model=nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)))
    with refused("dense", "'4.", "got none", error=InputError):
        merge(model=small_network()[:4])
    with refused("dense", "must have none for '5.weight'", "got 2x5", error=InputError):
        merge(model=nn.Sequential(*small_network(), nn.Linear(5, 2)))
    with refused("dense", "torch.nn.Module", "got str", error=ValueError):
        merge(model="network")
    with refused("dense", "parameters to train", "got Sequential", error=InputError):
        merge(model=small_network().requires_grad_(False))


def test_a_network_that_takes_or_gives_something_else_is_refused() -> None:
    with refused("dense", "float32 inputs (8, 13)", "got an error", error=InputError):
        merge(input_shape=(13,))
    with refused("dense", "one output for each class and each", "got ()", error=InputError):
        merge(model=Giving("one number"))
    for form in ("tuple", "dict"):
        torch.testing.assert_close(dict(merge(model=Giving(form))), dict(merge()))


def test_inputs_of_other_shapes_are_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    uploads = [maecho.make_upload(model, [torch.ones(4, *s)], f"{i}") for i, s in enumerate([(6,), (2, 3)])]
    with refused("1", "inputs must be (6,) as 0's are", "got (2, 3)"):
        maecho.aggregate(uploads, "dense", model=model)
    with refused("0", "(3, 2) as input_shape says", "got (6,)"):
        maecho.aggregate(uploads[:1], "dense", model=model, input_shape=(3, 2), scale="moments")


@pytest.mark.parametrize(
    ("option", "value", "parts"),
    [
        ("epochs", 0, ("epochs", "at least 1", "0")),
        ("generator_steps", 1.5, ("generator_steps", "whole number", "1.5")),
        ("student_steps", -1, ("student_steps", "at least 1", "-1")),
        ("batch_size", 1, ("batch_size", "at least 2", "1")),
        ("width", "wide", ("width", "'wide'")),
        ("learning_rate", 0, ("learning_rate", "positive", "0")),
        ("temperature", float("nan"), ("temperature", "positive", "nan")),
        ("batchnorm", -1.0, ("batchnorm", "at least 0", "-1.0")),
        ("boundary", -0.5, ("boundary", "at least 0", "-0.5")),
        ("ensemble", "votes", ("ensemble", "logits, probabilities", "'votes'")),
        ("start", "best", ("start", "average, random", "'best'")),
        ("scale", "big", ("scale", "moments, standard, unit", "'big'")),
        ("input_shape", 28, ("input_shape", "28")),
        ("input_shape", (), ("input_shape", "()")),
        ("input_shape", (1, 0), ("input_shape", "at least 1", "0")),
        ("seed", -1, ("seed", "-1")),
        ("device", "tpu9000", ("device", "'tpu9000'")),
    ],
)
def test_options_that_make_no_sense(option: str, value: Any, parts: tuple[str, ...]) -> None:
    with refused(*parts, error=ValueError):
        merge(**{option: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with refused("device must be cpu", "'cuda'", error=ValueError):
        merge(device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_result_of_a_gpu_is_where_the_uploads_are() -> None:
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    merged = merge(device="cuda")
    assert {tensor.device.type for tensor in merged.values()} == {"cpu"}
    for one, other in zip(states, (torch.get_rng_state(), torch.cuda.get_rng_state()), strict=True):
        assert torch.equal(one, other)
    on_cpu = merge(device="cpu")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, on_cpu[name], atol=1e-3, rtol=1e-3)
