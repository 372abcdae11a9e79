"""An upload of a size needs only leading directions: it is that of full eigenproblems, nearly, with the same ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from maecho.linalg import leading
from maecho.upload import size
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload
from support.clients import rng


def made(rank: str | int) -> Upload:
    """Images of 24 by 24 points in which near points are alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(576, 60), nn.ReLU(), nn.Linear(60, 3))
    noise = torch.randn(900, 1, 30, 30, generator=rng(1))
    x = nn.functional.avg_pool2d(noise, 7, stride=1) * 3
    batches = list(zip(x.split(64), torch.arange(900).remainder(3).split(64), strict=True))
    return make_upload(model, batches, "a", ["gram", "moments"], rank)


def matrices(upload: Upload) -> dict[str, Tensor]:
    moments = upload.statistics["moments"]
    found = {f"gram of {layer}": gram.dense()[0] for layer, gram in upload.statistics["gram"].items()}
    return found | {f"covariance {k}": c.dense()[0] for k, c in enumerate(moments.covariances)}


def ranks(upload: Upload) -> dict[str, int]:
    tensors = upload.tensors()
    return {key: tensor.shape[-1] for key, tensor in tensors.items() if key.endswith(("/values", "/ranks"))}


@pytest.mark.parametrize("generous", [size.GENEROUS, 0.05])
@pytest.mark.parametrize("rank", ["1.6x", "2.5x"])
def test_it_is_nearly_that_of_full_eigenproblems(rank: str, generous: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.05: the first guess is too low, so the directions are computed anew."""
    monkeypatch.setattr(leading, "WORTH", 1.5)
    monkeypatch.setattr(size, "GENEROUS", generous)
    found = made(rank)
    monkeypatch.setattr(size, "room", lambda *_: None)
    whole = made(rank)
    assert ranks(found) == ranks(whole)
    assert found.bytes() == whole.bytes()
    for name, expected in matrices(whole).items():
        got = matrices(found)[name]
        assert float((got - expected).norm() / expected.norm()) < 0.02, name
        assert float(got.trace()) == pytest.approx(float(expected.trace()), rel=0.01)
    moments, exact = found.statistics["moments"], whole.statistics["moments"]
    torch.testing.assert_close(moments.variances, exact.variances, rtol=1e-3, atol=1e-4)
    assert moments.in_cosines == exact.in_cosines


def test_full_eigenproblems_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of the first layer are wider than WORTH times what fits."""
    widths: list[int] = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: widths.append(A.shape[-1]) or original(A))
    monkeypatch.setattr(leading, "WORTH", 1.5)
    made("1.6x")
    assert max(widths) < 576
