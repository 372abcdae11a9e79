"""Every kind of layer as a matrix, and a kind of the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maecho.network import kinds, layers
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
    rows = kinds.rows(module, x)
    if layer.bias:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)
    got = rows @ layer.matrix(nn.Sequential(module).state_dict()).mT  # [g, batch · places, out / g]
    expected = module(x)
    channels = expected.movedim(-len(module.kernel_size) - 1, -1).reshape(-1, module.groups, got.shape[-1])
    torch.testing.assert_close(got, channels.transpose(0, 1))


def test_linear_takes_any_leading_axes() -> None:
    module = nn.Linear(5, 3).double()
    x = torch.randn(2, 7, 5, generator=rng(), dtype=torch.float64)
    rows = kinds.rows(module, x)
    torch.testing.assert_close((rows @ module.weight.T + module.bias)[0], module(x).reshape(-1, 3))


def test_an_embedding_is_a_matrix_over_one_hot_rows() -> None:
    model = nn.Sequential(nn.Embedding(6, 4))
    layer = layers.read(model).layers["0"]
    tokens = torch.tensor([[1, 5, 1], [0, 1, 2]])
    one_hot = torch.nn.functional.one_hot(kinds.rows(model[0], tokens)[0], 6).float()
    torch.testing.assert_close(one_hot @ layer.matrix(model.state_dict())[0].T, model(tokens).reshape(-1, 4))
