"""Grams of convolutions by shifts of maps, against the rows that the layer multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho.network import kinds
from maecho.statistics import gram
from maecho.upload.client import make_upload
from support.clients import rng

CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "padded": (nn.Conv2d(9, 4, 3, padding=1), (9, 8, 7)),
    "no bias, groups": (nn.Conv2d(18, 4, 3, padding="same", groups=2, bias=False), (18, 6, 6)),
    "circular": (nn.Conv2d(8, 4, (3, 5), padding=1, padding_mode="circular"), (8, 6, 7)),
    "valid": (nn.Conv2d(9, 4, 3, padding="valid"), (9, 5, 5)),
    "one axis": (nn.Conv1d(30, 4, 3, padding=1), (30, 12)),
    "stride": (nn.Conv2d(9, 4, 3, stride=2, padding=1), (9, 8, 7)),
    "dilation": (nn.Conv2d(9, 4, 3, dilation=2), (9, 8, 7)),
    "one place": (nn.Conv2d(70, 4, 1), (70, 4, 4)),
    "three axes": (nn.Conv3d(3, 4, 3, padding=1), (3, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(9, 4, 3, padding=1), (9, 8, 7)),
    "transposed, stride": (nn.ConvTranspose2d(9, 4, 3, stride=2), (9, 5, 4)),
}


def rows(module: nn.Module, x: Tensor) -> Tensor:
    found = kinds.rows(module, kinds.entering(module, (x,), {})).double()
    return found if module.bias is None else torch.cat([found, torch.ones(*found.shape[:-1], 1)], -1)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("waiting", [1, gram.WAITING])
def test_it_is_the_gram_of_the_rows(name: str, waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "WAITING", waiting)
    module, shape = CONVOLUTIONS[name]
    x = torch.rand(30, *shape, generator=rng(4))
    model = nn.Sequential(module, nn.Flatten())
    found = make_upload(model, x.split(7), "a", ["gram"], rank=None).statistics["gram"]["0"].dense().double()
    X = rows(module, x)
    expected = X.mT @ X
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    if module.bias is not None:
        assert float(found[0, -1, -1]) == pytest.approx(X.shape[1], rel=1e-6)


def test_maps_of_several_sizes() -> None:
    module = nn.Conv2d(9, 4, 3, padding=1)
    batches = [torch.rand(6, 9, side, 9, generator=rng(side)) for side in (9, 9, 7, 9, 2)]
    model = nn.Sequential(module, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = make_upload(model, batches, "a", ["gram"], rank=None).statistics["gram"]["0"].dense()[0].double()
    expected = sum(rows(module, x)[0].T @ rows(module, x)[0] for x in batches)
    assert float((found - expected).norm() / expected.norm()) < 1e-6


class Turned(kinds.Convolution):
    """Reads each patch from its end."""

    def rows(self, module: Any, x: Tensor) -> Tensor:
        return super().rows(module, x).flip(-1)


def test_a_derived_kind_with_other_rows_has_no_maps() -> None:
    module, x = nn.Conv2d(9, 4, 3), torch.rand(2, 9, 8, 7)
    assert kinds.Convolution().maps(module, x) is not None
    assert Turned().maps(module, x) is None


def test_shifts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    monkeypatch.setattr(gram, "patch_gram", lambda maps, kernel: calls.append(maps.shape) or original(maps, kernel))
    make_upload(nn.Sequential(CONVOLUTIONS["padded"][0], nn.Flatten()), torch.rand(30, 9, 8, 7).split(7), "a", ["gram"])
    assert sum(shape[1] for shape in calls) == 23  # the first batch has more rows than a row has entries


original = gram.patch_gram
