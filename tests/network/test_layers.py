"""How layers are read from a model, and written back."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import maecho
from maecho.network import layers
from support.clients import rng

MODELS = {
    "linear": nn.Linear(5, 3),
    "no bias": nn.Linear(5, 3, bias=False),
    "grouped": nn.Conv2d(6, 9, 3, groups=3),
    "embedding": nn.Embedding(6, 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_write_is_the_inverse_of_matrix(name: str) -> None:
    state = nn.Sequential(MODELS[name]).state_dict()
    layer = layers.read(nn.Sequential(MODELS[name])).layers["0"]
    matrix = layer.matrix(state)
    assert layer.shape(state) == tuple(matrix.shape)
    written = layer.write(matrix.double(), state)
    assert written.keys() == state.keys()
    for key in state:
        torch.testing.assert_close(written[key], state[key], rtol=0, atol=0)


WRONG: dict[str, tuple[layers.Layer, *tuple[str, ...]]] = {
    "no weight": (layers.Layer("0", "1.weight"), "layer '0' must have its weight '1.weight', got none"),
    "no bias": (layers.Layer("0", "W", "c"), "layer '0' must have its weight 'c', got none"),
    "a bias as weight": (layers.Layer("0", "b"), "'b' must have at least 2 axes to be read as a matrix, got (4,)"),
    "groups": (layers.Layer("0", "W", groups=3), "must have groups that divide its 4 outputs, got 3"),
    "no groups": (layers.Layer("0", "W", groups=0), "must have groups that divide its 4 outputs, got 0"),
    "another bias": (layers.Layer("0", "K", "b"), "'b' must have one entry for each of the 6 outputs of '0', got (4,)"),
    "turned kernels": (layers.Layer("0", "K", transposed=True), "must have 2 axes and 1 group", "got 3 and 1"),
    "turned groups": (layers.Layer("0", "W", groups=2, transposed=True), "must have 2 axes and 1 group", "got 2 and 2"),
    "turned bias": (layers.Layer("0", "W", "b", transposed=True), "each of the 5 outputs of '0', got (4,)"),
    "tokens": (layers.Layer("0", "W", "b", one_hot=True), "must have no bias beside inputs that are tokens, got 'b'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_does_not_fit_the_weights_says_why(name: str) -> None:
    layer, *words = WRONG[name]
    complaint = layer.complaint({"W": (4, 5), "K": (6, 2, 3), "b": (4,)})
    assert complaint is not None
    assert all(word in complaint for word in words)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_a_model_fits_its_weights(name: str) -> None:
    model = nn.Sequential(MODELS[name])
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert layers.read(model).layers["0"].complaint(shapes) is None


class Tied(nn.Module):
    """An embedding that is also the output layer, and two linear layers that share a weight but not a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(self.first(self.embed(tokens))).mean(1))


def test_tied_weights_are_one_tensor_with_the_inputs_of_all() -> None:
    model = Tied()
    tokens = torch.randint(0, 8, (16, 5), generator=rng())
    seen: list[torch.Tensor] = []
    for module in (model.first, model.second):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().reshape(-1, 4)))
    upload = maecho.make_upload(model, [tokens], "a", statistics=["gram"], rank=None)
    assert upload.aliases == {"second.weight": "first.weight", "out.weight": "embed.weight"}
    assert "second.weight" not in upload.weights
    rows = torch.cat(seen).double()
    torch.testing.assert_close(
        upload.statistics["gram"]["first"].dense()[0].double(), rows.T @ rows, rtol=1e-4, atol=1e-4
    )
    merged = maecho.aggregate([upload], "regmean")
    assert merged.keys() == model.state_dict().keys()
    torch.testing.assert_close(merged["out.weight"], merged["embed.weight"])
    assert {"first.bias", "second.bias"} <= set(merged.averaged)


def test_a_module_used_twice_counts_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    model, x = Twice(), torch.randn(10, 4, generator=rng())
    upload = maecho.make_upload(model, [x], "a", statistics=["gram"], rank=None)
    assert float(upload.statistics["gram"]["layer"].dense()[0, -1, -1]) == pytest.approx(20)


def test_what_has_no_matrix_is_named_and_an_unknown_layer_warned_of() -> None:
    class Powers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs() ** self.weight

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.token = nn.Parameter(torch.ones(4))
            self.powers = Powers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.linear(x)) + self.token
            return self.powers(h)

    with pytest.warns(UserWarning, match=r"since maecho cannot read them as matrices: powers \(Powers\)$"):
        upload = maecho.make_upload(Custom(), [torch.randn(8, 4, generator=rng())], "a")
    merged = maecho.aggregate([upload], "regmean")
    assert set(merged.averaged) == {"norm.weight", "norm.bias", "token", "powers.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maecho.make_upload(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), [torch.randn(8, 4)], "a")
