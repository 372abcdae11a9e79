"""Which matrices a network is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from maecho.network import norms
from maecho.network.packed.twin import twin_of
from maecho.network.stages import plan
from maecho.network.units import network
from support.clients import rng

IMAGE = torch.randn(4, 3, 6, 6, generator=rng(1))
ROWS = torch.randn(4, 6, generator=rng(2))


def test_a_joined_matrix_is_that_of_both() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), nn.BatchNorm2d(4)).double()
    norm = model[1]
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.copy_(torch.rand(4, generator=rng(3)) + 0.5)
    (unit,) = plan(twin_of(model).network, IMAGE.double()).stages[0]
    W = unit.matrix(model.eval())[0]
    rows = nn.functional.unfold(IMAGE.double(), 3).transpose(1, 2)
    expected = model(IMAGE.double()).flatten(2).transpose(1, 2)
    torch.testing.assert_close(rows @ W[:, :-1].T + W[:, -1], expected)


def test_a_synchronised_batchnorm_is_joined_as_any_other() -> None:
    """It computes the same in evaluation mode. Only training differs."""
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert isinstance(synchronised[1], nn.SyncBatchNorm)
    for model in (plain, synchronised):
        stages = plan(twin_of(model).network, ROWS).stages
        assert [[(unit.name, unit.norm) for unit in stage] for stage in stages] == [[("0", "1")], [("3", None)]]


def test_a_batchnorm_without_scale_or_memory_is_no_matrix() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2)
    )
    assert set(network(model)) == {"2"}


def test_counters_belong_to_no_unit() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    (unit,) = plan(twin_of(model).network, ROWS).stages[0]
    assert unit.parameters(model) == set(model.state_dict()) - {"1.num_batches_tracked"}


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(6), (4, 6)),
        (nn.BatchNorm1d(6), (4, 6, 3)),
        (nn.BatchNorm2d(6), (4, 6, 3, 2)),
        (nn.BatchNorm3d(6), (4, 6, 3, 2, 2)),
        (nn.SyncBatchNorm(6), (4, 6, 3)),
        (nn.GroupNorm(3, 6), (4, 6, 3, 2)),
        (nn.LayerNorm(6), (4, 2, 6)),
        (nn.LayerNorm((3, 2)), (4, 3, 2)),
        (nn.LayerNorm(6, bias=False), (4, 6)),
        (nn.RMSNorm(6), (4, 2, 6)),
    ],
    ids=str,
)
def test_a_norm_is_a_diagonal_matrix(norm: Any, shape: tuple[int, ...]) -> None:
    for p in norm.parameters():
        nn.init.normal_(p, generator=rng(1))
    if isinstance(norm, norms.BatchNorm):
        norm.running_mean.copy_(torch.randn(6, generator=rng(2)))
        norm.running_var.copy_(torch.rand(6, generator=rng(3)) + 0.1)
    x = torch.randn(shape, generator=rng(4)) * 3 + 1
    norm = norm.double().eval()
    unit = network(norm)[""]
    h = norms.norm_rows(norm, x.double())
    if unit.bias:
        h = torch.cat([h, torch.ones_like(h)], -1)
    torch.testing.assert_close(h @ unit.matrix(norm).mT, norms.norm_output_rows(norm, norm(x.double())))


def test_what_is_no_norm_is_named() -> None:
    with pytest.raises(TypeError, match="ReLU is not known as a norm"):
        norms.norm_rows(nn.ReLU(), ROWS)
