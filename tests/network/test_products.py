"""Transposed convolutions, bilinear layers, bags of tokens and Hugging Face's Conv1D as matrices, for any settings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification
from transformers.pytorch_utils import Conv1D

import maecho
from maecho.aggregation import FedMA
from maecho.network import derive, kinds, layers, verify
from maecho.network.hooks import watching
from maecho.network.kinds import products
from maecho.network.spaces import load
from support.clients import Net, rng
from support.contract import close
from support.networks import cnn, permuted_copies


def check(module: nn.Module, *args: Tensor, **kwargs: Any) -> None:
    """Rows times the matrix are the module's outputs, and the matrix is written back as it was."""
    model = nn.Sequential(module.double())
    layer, state = layers.read(model).layers["0"], model.state_dict()
    x = kinds.entering(module, args, kwargs)
    rows, W = layers.complete(kinds.rows(module, x), layer), layer.matrix(state)
    torch.testing.assert_close(rows @ W.mT, kinds.output_rows(module, module(*args, **kwargs)))
    assert layer.complaint({name: tensor.shape for name, tensor in state.items()}) is None
    assert layer.shape(state) == tuple(W.shape)
    assert kinds.inputs(module) == W.shape[-1] - (layer.bias is not None)
    for name, tensor in layer.write(W, state).items():
        assert torch.equal(tensor, state[name])


TYPES = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_transposed_convolution_is_a_matrix(data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 3))
    each = {
        name: tuple(data.draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes)))
        for name, low, high in [
            ("kernel", 1, 3),
            ("stride", 1, 3),
            ("padding", 0, 2),
            ("dilation", 1, 2),
            ("size", 1, 4),
        ]
    }
    extra = tuple(
        data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(each["stride"], each["dilation"], strict=True)
    )
    groups, batched = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    for n, s, p, d, k, e in zip(
        each["size"], each["stride"], each["padding"], each["dilation"], each["kernel"], extra, strict=True
    ):
        assume((n - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0)
    module = TYPES[axes](
        2 * groups, 3 * groups, each["kernel"], each["stride"], each["padding"], extra, groups,
        data.draw(st.booleans()), each["dilation"],
    )  # fmt: skip
    x = torch.randn((2,) * batched + (2 * groups, *each["size"]), generator=rng(), dtype=torch.float64)
    check(module, x)
    z = module(x)
    if all(e < s for e, s in zip(extra, each["stride"], strict=True)):  # what torch lets a call ask for
        check(module, x, output_size=list(z.shape[-axes:]))
    bare = kinds.without_bias(module, z.unsqueeze(0) if not batched else z)
    b = 0 if module.bias is None else module.bias.reshape(-1, *[1] * axes)
    torch.testing.assert_close(bare + b, z.reshape(bare.shape))


def test_a_call_may_ask_for_another_size() -> None:
    module = nn.ConvTranspose2d(2, 3, 3, stride=2)
    x = torch.randn(2, 2, 4, 5, generator=rng(), dtype=torch.float64)
    check(module, x, output_size=[10, 12])
    check(module, x, output_size=[2, 3, 10, 11])
    assert (
        kinds.entering(module, (x, [10, 12]), {}).shape == kinds.entering(module, (x,), {"output_size": [10, 12]}).shape
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_a_bilinear_layer_is_a_matrix_over_products(lead: list[int], one: int, two: int, bias: bool) -> None:
    draw = rng()
    x, y = (torch.randn(*lead, d, generator=draw, dtype=torch.float64) for d in (one, two))
    check(nn.Bilinear(one, two, 3, bias=bias), x, y)
    module = nn.Bilinear(one, two, 3).double()
    assert torch.equal(kinds.entering(module, (x, y), {}), kinds.entering(module, (x,), {"input2": y})), (
        "by position or by name"
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_bag_is_a_matrix_over_counts(data: st.DataObject) -> None:
    mode, count = data.draw(st.sampled_from(["sum", "mean"])), data.draw(st.integers(1, 7))
    padding = data.draw(st.none() | st.integers(-count, count - 1))
    last = data.draw(st.booleans())
    module = nn.EmbeddingBag(count, 3, mode=mode, padding_idx=padding, include_last_offset=last)
    n = data.draw(st.integers(1, 8))
    tokens = torch.randint(0, count, (n,), generator=rng())
    weights = {}
    if mode == "sum" and data.draw(st.booleans()):
        weights = {"per_sample_weights": torch.randn(n, generator=rng(), dtype=torch.float64)}
    starts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    offsets = torch.tensor([0, *starts, *([n] if last else [])])
    check(module, tokens, offsets, **weights)
    check(module, tokens, **weights, offsets=offsets)
    if not last:
        check(module, torch.stack([tokens, tokens.flip(0)]))


def test_what_is_too_wide_or_takes_the_largest_is_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds.find(nn.EmbeddingBag(5, 3, mode="max")) is None
    for module in (nn.EmbeddingBag(5, 3), nn.Bilinear(5, 1, 3)):
        assert kinds.find(module) is not None
        monkeypatch.setattr(products, "WIDEST", 4)
        assert kinds.find(module) is None
        assert layers.read(module).unknown == (type(module).__name__,)
        monkeypatch.undo()


def test_conv1d_of_hugging_face_is_a_fully_connected_layer() -> None:
    module = Conv1D(4, 6)
    check(module, torch.randn(2, 7, 6, generator=rng(), dtype=torch.float64))
    assert kinds.registered(module)

    class Derived(Conv1D):
        pass

    assert not kinds.registered(Derived(4, 6))
    assert isinstance(kinds.find(Derived(4, 6)), products.InputsFirst)


def test_nearly_all_of_gpt2_is_read_as_matrices() -> None:
    """Everything but its norms. Without Conv1D 87 per cent of its weights were averaged."""
    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, num_labels=3, pad_token_id=1)
    model = GPT2ForSequenceClassification(config).eval()
    found = layers.read(model)
    read = {part for layer in found.layers.values() for part in (layer.weight, layer.bias)}
    assert not found.unknown
    assert {name for name, _ in model.named_parameters() if name not in read} == {
        name for name, _ in model.named_parameters() if ".ln_" in name
    }
    tokens = torch.randint(2, 40, (8, 6), generator=rng())
    upload = maecho.make_upload(model, [{"input_ids": tokens, "labels": torch.arange(8) % 3}], "a", ["gram", "classes"])
    assert upload.recipe["unknown"] == []


def bags(mode: str = "mean", seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = {"bag": nn.EmbeddingBag(9, 6, mode=mode, padding_idx=2), "hidden": nn.Linear(6, 7)}
        return nn.Sequential(OrderedDict(parts, act=nn.Tanh(), head=nn.Linear(7, 3)))


TOKENS, Y = torch.randint(0, 9, (40, 5), generator=rng(0)), torch.arange(40) % 3
ALSO = ["gram", "projector", "classes", "fisher", "gradients", "targets"]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    "method", ["fedavg", "regmean", "fisher", "kronecker", "ma-echo", "ot", "ma-echo+ot", "pfnm", "afl"]
)
def test_bags_come_back_alone_and_as_twins(mode: str, method: str) -> None:
    model = bags(mode)
    uploads = [
        maecho.make_upload(model, [(TOKENS[k:], Y[k:])], f"{k}", ALSO, rank=None)
        for k in ((0,) if method == "pfnm" else (0, 7))
    ]
    assert "bag" in {layer.name for layer in uploads[0].layers}
    for given_ in (uploads[:1], uploads):
        own = {k: t for k, t in model.state_dict().items() if not (method == "afl" and k.startswith("head"))}
        close({k: maecho.aggregate(given_, method)[k] for k in own}, own, 1e-4)


def test_bags_are_relayed() -> None:
    for pairs in ([0], [0, 7]):
        merged = maecho.relay(bags(seed=5), [(bags(), [(TOKENS[k:], Y[k:])]) for k in pairs])
        model = bags(seed=6)
        model.load_state_dict(dict(merged))
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS), bags()(TOKENS), rtol=1e-3, atol=1e-3)


def test_a_bag_of_the_largest_is_averaged_and_named() -> None:
    model = Net(
        lambda net, tokens: net.head(net.bag(tokens)), bag=nn.EmbeddingBag(9, 6, mode="max"), head=nn.Linear(6, 3)
    )
    with pytest.warns(UserWarning, match=r"averaged without statistics, .*: bag \(EmbeddingBag\)"):
        uploads = [maecho.make_upload(model, [(TOKENS, Y)], name, ["gram"]) for name in "ab"]
    assert "bag.weight" in maecho.aggregate(uploads, "regmean").averaged


def by_autograd(model: nn.Module, x: Any, names: list[str]) -> Mapping[str, Tensor]:
    """Σ over examples and classes of the squares of √p_c ∂ log p_c / ∂θ, one gradient at a time."""
    sums = {name: torch.zeros_like(model.get_parameter(name)) for name in names}
    for one in x:
        logs = model(one.unsqueeze(0)).log_softmax(-1)[0]
        for log in logs:
            found = torch.autograd.grad(log, [model.get_parameter(n) for n in names], retain_graph=True)
            for name, gradient in zip(names, found, strict=True):
                sums[name] += log.exp().detach() * gradient.square()
    return sums


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1)
        self.each = nn.ConvTranspose2d(4, 4, 2, groups=4)
        self.down = nn.ConvTranspose2d(4, 3, 2, bias=False)
        self.pair = nn.Bilinear(3, 3, 4)
        self.head = Conv1D(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.down(torch.tanh(self.each(torch.tanh(self.up(x)))))).mean((2, 3))
        return self.head(torch.tanh(self.pair(h, h.square())))


def test_statistics_are_those_of_autograd() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cases = [(Maps().double(), torch.randn(6, 2, 3, 4, dtype=torch.float64)), (bags().double(), TOKENS[:6])]
    for model, x in cases:
        upload = maecho.make_upload(
            model, [(x, Y[:6])], "a", [*ALSO, *(["moments"] if x.is_floating_point() else [])], rank=None
        )
        assert not upload.recipe["unknown"]
        names = [name for name, _ in model.named_parameters()]
        expected = by_autograd(model, x, names)
        for name in names:
            torch.testing.assert_close(upload.statistics["fisher"][name].double(), expected[name], rtol=1e-5, atol=1e-9)
        seen: dict[str, Tensor] = {}

        def see(name: str, module: nn.Module, x: Tensor, seen: dict[str, Tensor] = seen) -> None:
            seen[name] = kinds.rows(module, x)

        with watching(model, [layer.name for layer in upload.layers], see):
            model(x)
        for layer in upload.layers:
            rows = layers.complete(seen[layer.name], layer)
            torch.testing.assert_close(
                upload.statistics["gram"][layer.name].dense(), rows.mT @ rows, rtol=1e-5, atol=1e-6, check_dtype=False
            )


def test_their_neurons_are_followed() -> None:
    model, x = Maps(), torch.randn(6, 2, 3, 4, generator=rng())
    spaces = derive(model, x)
    assert [(space.name, space.size) for space in spaces] == [("up", 4), ("pair", 4)], (
        "what a bilinear layer takes stays"
    )
    assert {(p.tensor, p.axis) for p in spaces[0].places} == {
        ("up.weight", 1), ("up.bias", 0), ("each.weight", 0), ("each.bias", 0), ("down.weight", 0),
    }  # fmt: skip
    verify(model, spaces, x)
    found = derive(bags(), TOKENS)
    assert [(space.name, space.size) for space in found] == [("bag", 6), ("hidden", 7)]
    verify(bags(), found, TOKENS)


def test_the_grown_network_runs() -> None:
    """Layers of these kinds, and depthwise ones, take their new sizes."""
    model, x = Maps(), torch.randn(6, 2, 3, 4, generator=rng())
    uploads = [maecho.make_upload(Maps(), [(x, Y[:6])], name, ["classes"]) for name in "abc"]
    merged = maecho.aggregate(uploads, FedMA(growth=3.0, gamma=1e6))
    assert merged["each.weight"].shape[0] > 4
    assert load(model, merged)(x).shape == (6, 3)
    assert (model.each.in_channels, model.each.groups) == (len(merged["each.weight"]),) * 2
    assert model.head.nx == len(merged["head.weight"])


def test_a_depthwise_convolution_may_grow() -> None:
    _, x, _ = permuted_copies("cnn", 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        uploads = [maecho.make_upload(cnn(), [(x, torch.arange(12) % 5)], name, ["classes"]) for name in "abc"]
    merged = maecho.aggregate(uploads, FedMA(growth=3.0, gamma=1e6))
    assert merged["4.weight"].shape[0] > 8
    assert load(cnn(), merged)(x).shape == (12, 5)
