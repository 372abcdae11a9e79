"""Every layer as a matrix: rows times the matrix is what the layer computes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import maecho
from maecho.network import layers
from support.clients import rng

CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 11)),
    "1d strided, dilated, grouped": (nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=3, groups=2), (2, 4, 13)),
    "2d": (nn.Conv2d(3, 8, 3), (2, 3, 9, 7)),
    "2d without bias": (nn.Conv2d(3, 8, 3, bias=False), (2, 3, 9, 7)),
    "2d strided": (nn.Conv2d(3, 8, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 3, 9, 8)),
    "2d dilated": (nn.Conv2d(3, 8, 3, dilation=(1, 2), padding=2), (2, 3, 9, 8)),
    "2d same": (nn.Conv2d(3, 8, (4, 3), padding="same", dilation=(2, 1)), (2, 3, 9, 8)),
    "2d valid": (nn.Conv2d(3, 8, 3, padding="valid"), (2, 3, 9, 8)),
    "2d circular": (nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), (2, 3, 9, 8)),
    "2d reflect": (nn.Conv2d(3, 8, 3, padding=2, padding_mode="reflect"), (2, 3, 9, 8)),
    "2d replicate same": (nn.Conv2d(3, 8, (4, 3), padding="same", padding_mode="replicate"), (2, 3, 9, 8)),
    "2d grouped": (nn.Conv2d(6, 9, 3, groups=3, padding=1), (2, 6, 5, 6)),
    "2d depthwise": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 6)),
    "2d one by one": (nn.Conv2d(4, 5, 1), (2, 4, 5, 6)),
    "2d one image": (nn.Conv2d(3, 8, 3), (3, 9, 7)),
    "3d": (nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=1), (2, 2, 5, 6, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_rows_times_matrix_is_the_convolution(name: str) -> None:
    module, shape = CONVOLUTIONS[name]
    module = module.double()
    x = torch.randn(shape, generator=rng(), dtype=torch.float64)
    layer = layers.read(nn.Sequential(module)).layers["0"]
    rows = layers.rows(module, x)
    if layer.bias:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)
    got = rows @ layer.matrix(nn.Sequential(module).state_dict()).mT  # [g, batch · places, out / g]
    expected = module(x)
    channels = expected.movedim(-len(module.kernel_size) - 1, -1).reshape(-1, module.groups, got.shape[-1])
    torch.testing.assert_close(got, channels.transpose(0, 1))


def test_linear_takes_any_leading_axes() -> None:
    module = nn.Linear(5, 3).double()
    x = torch.randn(2, 7, 5, generator=rng(), dtype=torch.float64)
    rows = layers.rows(module, x)
    torch.testing.assert_close((rows @ module.weight.T + module.bias)[0], module(x).reshape(-1, 3))


def test_an_embedding_is_a_matrix_over_one_hot_rows() -> None:
    model = nn.Sequential(nn.Embedding(6, 4))
    layer = layers.read(model).layers["0"]
    tokens = torch.tensor([[1, 5, 1], [0, 1, 2]])
    one_hot = torch.nn.functional.one_hot(layers.rows(model[0], tokens)[0], 6).float()
    torch.testing.assert_close(one_hot @ layer.matrix(model.state_dict())[0].T, model(tokens).reshape(-1, 4))


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
    torch.testing.assert_close(upload.grams["first"].dense()[0].double(), rows.T @ rows, rtol=1e-4, atol=1e-4)
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
    assert float(upload.grams["layer"].dense()[0, -1, -1]) == pytest.approx(20)


def test_what_has_no_matrix_is_named_and_an_unknown_layer_warned_of() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.token = nn.Parameter(torch.ones(4))
            self.bilinear = nn.Bilinear(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.linear(x)) + self.token
            return self.bilinear(h, h)

    with pytest.warns(UserWarning, match=r"not being known as matrices: bilinear \(Bilinear\)$"):
        upload = maecho.make_upload(Custom(), [torch.randn(8, 4, generator=rng())], "a")
    merged = maecho.aggregate([upload], "regmean")
    assert set(merged.averaged) == {"norm.weight", "norm.bias", "token", "bilinear.weight", "bilinear.bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maecho.make_upload(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), [torch.randn(8, 4)], "a")
