"""Statistics of gradients agree with one autograd call for each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho.statistics.per_example import LongWay
from maecho.upload.client import make_upload
from support.clients import batches, network, rng
from support.tiny import refused_input


class Free(nn.Module):
    """A network with a free and a frozen parameter, an in-place activation, a layer without bias, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.idle = nn.Linear(12, 6), nn.Linear(6, 5, bias=False), nn.Linear(3, 3)
        self.scale, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(nn.functional.relu(self.one(x), inplace=True) * self.scale + self.shift)


class Tokens(nn.Module):
    """A network whose padded embedding shares its weight with the output layer. One layer sees many rows an example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, padding_idx=0)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).tanh().mean(1))


class PlainTokens(nn.Module):
    def __init__(self, padding: int | None = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, padding_idx=padding), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh().mean(1))


class SequenceFirst(nn.Module):
    """Rows are ordered by place, not by example. There are as many places as examples, so shapes do not show this."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().mean(0))


class Elsewhere(nn.Module):
    """A network with a weight that is also used outside of its module, and one that is used only there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(self.inner(x).tanh(), self.inner.weight)
        return nn.functional.linear(h, self.head.weight, self.head.bias)


class Branching(nn.Module):
    """A network with a branch on values, which torch.func cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.two(self.norm(h) if float(h.detach().sum()) > -1e9 else h)


class Recurrent(nn.Module):
    """A network with a layer that is used twice, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.one(x).tanh()).tanh()).tanh())


def rows(n: int = 6) -> Tensor:
    return torch.randn(n, 12, generator=rng(1), dtype=torch.float64)


def image(n: int = 4) -> Tensor:
    return torch.randn(n, 4, 7, 6, generator=rng(1), dtype=torch.float64)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Conv2d(6, 4, 2, bias=False),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (network, rows),
    "free": (Free, rows),
    "convolutions": (convolutional, image),
    "tied tokens": (Tokens, lambda: torch.randint(0, 5, (7, 4), generator=rng(3))),
    "padded tokens": (PlainTokens, lambda: torch.randint(0, 5, (7, 4), generator=rng(3))),
    "tokens": (lambda: PlainTokens(None), lambda: torch.randint(0, 5, (7, 4), generator=rng(3))),
    "sequence first": (SequenceFirst, lambda: torch.randn(4, 4, 3, generator=rng(4), dtype=torch.float64)),
    "elsewhere": (Elsewhere, rows),
    "branching": (Branching, rows),
    "recurrent": (Recurrent, rows),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, inputs = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = make().double(), inputs()
        if name == "convolutions":
            model(x)  # running statistics that are not 0 and 1
    y = torch.randint(0, 3, (len(x),), generator=rng(2))
    return model.eval(), x, y


def by_hand(model: nn.Module, x: Tensor, y: Tensor | None) -> dict[str, Tensor]:
    """The definition: one autograd call for each example and label."""
    parameters = dict(model.named_parameters())
    frozen = {name: p.requires_grad for name, p in parameters.items()}
    for p in parameters.values():
        p.requires_grad_(True)
    F = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in range(len(x)):
        logp = model(x[i : i + 1]).log_softmax(-1)[0]
        for c in range(len(logp)) if y is None else [int(y[i])]:
            weight = float(logp[c].detach().exp()) if y is None else 1.0
            found = torch.autograd.grad(logp[c], list(parameters.values()), retain_graph=True, allow_unused=True)
            for name, g in zip(parameters, found, strict=True):
                if g is not None:
                    F[name] += weight * g.square()
    for name, p in parameters.items():
        p.requires_grad_(frozen[name])
    return F


@pytest.mark.filterwarnings("ignore:.*nothing of")
@pytest.mark.parametrize("labels", ["expected", "observed"])
@pytest.mark.parametrize("name", MODELS)
def test_fisher_is_one_gradient_an_example(name: str, labels: Any) -> None:
    model, x, y = made(name)
    data = list(zip(x.split(4), y.split(4), strict=True))
    upload = make_upload(model, data, "a", ["fisher", "gram"], rank=None, labels=labels)
    expected = by_hand(model, x, None if labels == "expected" else y)
    assert upload.statistics["fisher"].keys() == expected.keys()
    for key, F in expected.items():
        torch.testing.assert_close(upload.statistics["fisher"][key], F, msg=lambda m, k=key: f"{k}: {m}")
    alone = make_upload(model, data, "a", ["gram"], rank=None)
    for layer, gram in alone.statistics["gram"].items():  # further passes have added nothing to it
        torch.testing.assert_close(upload.statistics["gram"][layer].values, gram.values)


@pytest.mark.parametrize("labels", ["expected", "observed"])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "tokens", "recurrent"])
def test_gradients_are_the_gram_of_what_comes_back(name: str, labels: Any) -> None:
    model, x, y = made(name)
    upload = make_upload(model, [(x, y)], "a", ["gradients"], rank=None, labels=labels)
    outputs: dict[str, list[Tensor]] = {layer.name: [] for layer in upload.layers}
    parent = {id(dict(model.named_modules())[layer.name]): layer.name for layer in upload.layers}
    if name == "recurrent":
        parent[id(model.two)] = "one"  # they share a weight, so they are one matrix
    for module in model.modules():
        if id(module) in parent:
            module.register_forward_hook(lambda m, _, z: outputs[parent[id(m)]].append(z))
    if name == "convolutions":
        model[2].inplace = False
    B = {}
    for layer in upload.layers:
        groups, out, _ = layer.shape(upload.weights)
        B[layer.name] = torch.zeros(groups, out, out, dtype=torch.float64)
    for i in range(len(x)):
        for zs in outputs.values():
            zs.clear()
        logp = model(x[i : i + 1]).log_softmax(-1)[0]
        for c in range(len(logp)) if labels == "expected" else [int(y[i])]:
            weight = float(logp[c].detach().exp()) if labels == "expected" else 1.0
            for layer in upload.layers:
                for g in torch.autograd.grad(logp[c], outputs[layer.name], retain_graph=True):
                    # A group's channels, at every place, are one row.
                    rows = g.movedim(1, -1) if g.dim() == 4 else g
                    rows = rows.reshape(-1, layer.groups, B[layer.name].shape[-1]).transpose(0, 1)
                    B[layer.name] += weight * rows.mT @ rows
    for layer_name, expected in B.items():
        torch.testing.assert_close(upload.statistics["gradients"][layer_name].dense(), expected)


def test_random_signs_are_right_on_average() -> None:
    model, x, _ = made("mlp")
    draw, count = rng(7), 400
    exact = make_upload(model, [x], "a", ["fisher", "gradients"], rank=None)
    many = make_upload(model, [x] * count, "a", ["fisher", "gradients"], rank=None, labels="sampled", generator=draw)
    for name, F in exact.statistics["fisher"].items():
        assert float((many.statistics["fisher"][name] / count - F).norm() / F.norm()) < 0.15
    for name, B in exact.statistics["gradients"].items():
        assert float((many.statistics["gradients"][name].dense() / count - B.dense()).norm() / B.dense().norm()) < 0.15


def test_a_sure_model_is_sampled_with_little_noise() -> None:
    """For a confident model, a label drawn from p is nearly always the likeliest one, and its gradient is nearly 0."""
    model, x, _ = made("mlp")
    with torch.no_grad():
        model[4].bias += torch.tensor([12.0, 0, 0, 0, 0])
    exact = make_upload(model, [x] * 50, "a", ["fisher"], rank=None).statistics["fisher"]["4.bias"]
    drawn = make_upload(model, [x] * 50, "a", ["fisher"], rank=None, labels="sampled", generator=rng()).statistics[
        "fisher"
    ]["4.bias"]
    assert float((drawn - exact).norm() / exact.norm()) < 0.3


@pytest.mark.filterwarnings("ignore:.*nothing of")
def test_the_model_comes_back_as_it_was() -> None:
    model = Free().train()
    model(batches()[0][0]).sum().backward()
    before = {name: (p.detach().clone(), p.grad, p.requires_grad) for name, p in model.named_parameters()}
    make_upload(model, batches(), "a", ["fisher", "gradients", "gram"])
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.grad is before[name][1]
        assert p.requires_grad == before[name][2]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Linear(12, 1)), "not two or more class scores"),
        (nn.Sequential(nn.Linear(12, 6), nn.Unflatten(1, (2, 3))), "not one row of class scores"),
    ],
)
def test_outputs_that_are_no_classes_have_no_fisher(model: nn.Module, why: str) -> None:
    with pytest.warns(UserWarning, match=f"a: not sent: fisher, gradients, since the model's output is {why}"):
        upload = make_upload(model, [x for x, _ in batches()], "a", ["fisher", "gradients"])
    assert upload.has == frozenset()
    assert all(why in upload.recipe["not_sent"][name] for name in ("fisher", "gradients"))


def test_two_classes_are_enough() -> None:
    x = batches()[0][0]
    model = nn.Sequential(nn.Linear(12, 2))
    upload = make_upload(model, [x], "a", ["fisher"])
    torch.testing.assert_close(upload.statistics["fisher"]["0.weight"], by_hand(model, x, None)["0.weight"])


def test_one_output_that_is_not_finite_is_refused() -> None:
    x, model = batches()[0][0].clone(), nn.Sequential(nn.Linear(12, 3))
    x[3], model[0].weight.data[:] = 3e38, 1.0  # whose sum float32 does not hold
    with refused_input("a: the model's outputs must be finite, got NaN or infinity"):
        make_upload(model, [x], "a", ["fisher"])


def test_observed_labels_must_be_there() -> None:
    with pytest.warns(UserWarning, match="a: not sent: fisher, since the batches carry no"):
        upload = make_upload(network(), [x for x, _ in batches()], "a", ["fisher"], labels="observed")
    assert upload.has == frozenset()
    assert upload.recipe["not_sent"] == {"fisher": "the batches carry no whole-number label for every example"}


def test_inputs_may_be_a_mapping() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gain = network(), nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor, scale: Tensor, power: int) -> Tensor:
            return self.inner(x * scale.unsqueeze(1) ** power) * self.gain

    x = batches()[0][0].double()
    model = Named().double()
    upload = make_upload(model, [{"x": x, "scale": torch.ones(16).double(), "power": 2}], "a", ["fisher"], rank=None)
    whole = by_hand(nn.Sequential(network().double()), x, None)
    torch.testing.assert_close(upload.statistics["fisher"]["inner.0.weight"], whole["0.0.weight"])
    # For outputs a ∘ z, the gradient of a is that of z times z, of the last bias that of z.
    z = network().double()(x).detach()
    p = z.softmax(-1)
    torch.testing.assert_close(upload.statistics["fisher"]["gain"], (p * (1 - p) * z.square()).sum(0))


def test_a_model_that_mixes_examples_is_refused_in_one_sentence() -> None:
    model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 5))
    with refused_input("a: ", "fisher", "one example at a time", "got an error"):
        make_upload(model, batches(), "a", ["fisher"])


def test_the_padding_of_an_embedding_costs_no_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights get no gradient. Rows that counted them would not agree with torch, which takes long to put right."""

    def squares(self: LongWay, *_: Any) -> dict[str, Tensor]:
        raise AssertionError("the long way")

    monkeypatch.setattr(LongWay, "squares", squares)
    tokens = torch.randint(0, 5, (20, 6), generator=rng())
    assert (tokens == 2).any()
    F = make_upload(PlainTokens(padding=2), [tokens], "ann", ["fisher"], rank=None).statistics["fisher"]["embed.weight"]
    assert not F[2].any()
    assert bool((F[[0, 1, 3, 4]] > 0).all())
