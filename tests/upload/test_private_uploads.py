"""Uploads with privacy: what one example can change, the noise on moments, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import maecho
from maecho import InputError, Privacy, Upload, make_upload
from maecho.cli import inspecting
from maecho.network.forward import forward
from maecho.network.layers import read
from maecho.statistics import Options
from maecho.statistics.statistic import Setting
from maecho.upload import inspection
from maecho.upload.private import ClippedSums
from support.private import case, rng
from support.tiny import batches, network


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), clip=st.floats(0.01, 100), scale=st.floats(0.01, 1000), shared=st.booleans())
def test_one_example_changes_the_moments_by_no_more_than_promised(
    seed: int, clip: float, scale: float, shared: bool
) -> None:
    privacy = Privacy(1.0, clip)
    model, _, x, y = case("linear", seed, scale=scale)

    def sums(x: Tensor, y: Tensor) -> ClippedSums:
        setting = Setting("c", model, read(model), Options(covariance="shared" if shared else "class"))
        found = ClippedSums(setting, clip, 3, True)
        for step in forward(model, [(x[:4], y[:4]), (x[4:], y[4:])], "c"):
            found.add(step)
        return found

    whole, less = sums(x, y), sums(x[:-1], y[:-1])
    assert float((whole.counts - less.counts).norm()) == 1
    slack = 1 + 1e-6
    assert float((whole.totals - less.totals).norm()) <= privacy.sensitivity("totals") * slack
    change = [whole.squares(k) - less.squares(k) for k in range(1 if shared else 3)]
    assert float(torch.stack(change).norm()) <= privacy.sensitivity("gram") * slack


def test_the_noise_on_moments_has_the_promised_scale() -> None:
    x, y = torch.randn(4000, 3, generator=rng()), torch.zeros(4000, dtype=torch.int64)
    model = network(width=3).double()
    counts, means, seconds = [], [], []
    privacy, clip = Privacy(2.0, 1.5, generator=rng(7)), 1.5
    rows = x.double() * (clip / x.double().norm(dim=1, keepdim=True)).clamp(max=1)
    for _ in range(400):
        upload = make_upload(model, [(x.double(), y)], "c", rank=None, privacy=privacy)
        moments = upload.statistics["moments"]
        assert moments is not None
        assert int(moments.classes[0]) == 0
        n, mean = 4000.0, moments.means[0]
        counts.append(float(moments.counts[0]) - n)
        means.append((mean * moments.counts[0] - rows.sum(0)) / clip)
        second = moments.covariances[0].dense()[0] + torch.outer(mean, mean)
        seconds.append((second * moments.counts[0] - rows.T @ rows)[torch.ones(3, 3).triu().bool()] / clip**2)
    std = 2 * 3**0.5
    assert torch.tensor(counts).std().item() == pytest.approx(std, rel=0.15)
    assert torch.stack(means).std().item() == pytest.approx(std, rel=0.1)
    assert torch.stack(seconds).std().item() == pytest.approx(std, rel=0.1)


def test_an_upload_with_privacy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = batches(3000)
    only = [(x[y != 1], y[y != 1]) for x, y in data]
    upload = make_upload(network(), only, "ann", privacy=Privacy(1.0, 2.0, generator=rng()))
    assert upload.has == {"moments", "classes"}
    assert upload.statistics.get("moments") is not None
    assert upload.statistics.get("classes") is not None
    assert upload.statistics["moments"].classes.tolist() == [0, 2], "a class without examples drowns in its noise"
    assert upload.statistics["classes"][1] == 0
    assert upload.statistics["moments"].counts.tolist() == upload.statistics["classes"][[0, 2]].tolist()
    assert upload.statistics["classes"].tolist() == pytest.approx([1000, 0, 1000], abs=10)
    said = upload.recipe["privacy"]
    assert said["epsilon"] == pytest.approx(Privacy(1.0, 2.0).epsilon())
    assert "weights themselves are not covered" in said["covers"]
    upload.save(tmp_path / "ann.safetensors")
    again = Upload.load(tmp_path / "ann.safetensors")
    sentence = inspection.privacy(again)
    assert sentence is not None
    inspecting.show_upload(tmp_path / "ann.safetensors", as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Privacy, as the client says: {sentence}." in shown
    assert "(ε, δ) = (4.377, 1e-05) for one example of one client, added or removed" in shown
    model = network()
    merged = maecho.aggregate([again], "echo-chain", model=model)
    assert all(tensor.isfinite().all() for tensor in merged.values())


@pytest.mark.filterwarnings("ignore:.*not sent")
def test_uploads_without_labels_or_of_tokens_or_with_one_covariance() -> None:
    privacy = Privacy(1.0, 2.0, generator=rng())
    bare = make_upload(network(), [x for x, _ in batches(300)], "ann", privacy=privacy)
    assert bare.has == {"moments"}
    assert bare.statistics.get("moments") is not None
    assert bare.statistics["moments"].classes.tolist() == [-1]
    assert "no whole-number label" in bare.recipe["not_sent"]["classes"]
    own, _, x, y = case("text", 0, n=300)
    counted = make_upload(own, [(x, y)], "ann", ("classes",), privacy=privacy)
    assert counted.has == {"classes"}
    shared = make_upload(network(), batches(300), "ann", rank=None, covariance="shared", privacy=privacy)
    assert shared.statistics.get("moments") is not None
    assert len(shared.statistics["moments"].covariances) == 1
    with pytest.raises(InputError, match="ann: for moments the inputs must be one tensor of real numbers, got oth"):
        make_upload(own, [(x, y)], "ann", privacy=privacy)


def test_little_noise_gives_the_plain_moments() -> None:
    data = batches(90)
    for covariance in ("class", "shared"):
        plain = make_upload(network().double(), _double(data), "c", ("moments",), rank=None, covariance=covariance)
        private = make_upload(
            network().double(), _double(data), "c", rank=None, covariance=covariance, privacy=Privacy(1e-12, 100.0)
        )
        assert plain.statistics.get("moments") is not None
        assert private.statistics.get("moments") is not None
        assert torch.equal(plain.statistics["moments"].counts, private.statistics["moments"].counts)
        torch.testing.assert_close(plain.statistics["moments"].means, private.statistics["moments"].means)
        for one, other in zip(
            plain.statistics["moments"].covariances, private.statistics["moments"].covariances, strict=True
        ):
            torch.testing.assert_close(one.dense(), other.dense())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": ("gram",)}, "with privacy the statistics must be among classes, moments, got 'gram'"),
        ({"gaussians": 2}, "with privacy there must be one Gaussian a class, got gaussians=2"),
        ({"privacy": Privacy(1000.0, 1.0, generator=rng())}, "some class must have at least .* examples, got none"),
        ({"batches": []}, "the batches must hold at least one example, got none"),
        ({"batches": [*batches(), batches()[0][0]]}, "with privacy all batches or none must have labels, got both"),
        ({"batches": [(torch.randn(3, 4), torch.tensor([0, 1, 3]))]}, "labels must lie in 0 … 2"),
    ],
)
def test_uploads_that_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"batches": batches(), "client": "ann", "privacy": Privacy(1.0, 1.0), **options}
    with pytest.raises(InputError, match=f"ann: .*{message}"):
        make_upload(network(), **given)


def test_inputs_that_are_too_long_or_not_of_one_shape() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(5000, 3))
    with pytest.raises(
        InputError, match="ann: for moments with privacy an input must have at most 4096 numbers, got 5"
    ):
        make_upload(flat, [torch.zeros(2, 5000)], "ann", privacy=Privacy(1.0, 1.0))
    pooled = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"ann: for moments all inputs must have one shape, got \(1, 4\) and \(1, 6\)"):
        make_upload(pooled, [torch.zeros(2, 1, 4), torch.zeros(2, 1, 6)], "ann", privacy=Privacy(1.0, 1.0))
    maps = nn.Conv1d(1, 2, 3)
    with pytest.raises(InputError, match="ann: with privacy labels must be classes of the model, one output each, got"):
        make_upload(maps, [(torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int64))], "ann", privacy=Privacy(1.0, 1.0))


def _double(data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in data]
