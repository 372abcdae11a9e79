"""Features: at which layer they are gathered, what they hold, and how echo-chain uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.alignment.transport import Alignment
from maecho.echo import simulated
from maecho.lab.training import LocalTraining
from maecho.linalg.gaussians import Gaussians
from maecho.network.spaces import permute
from maecho.network.tracing import derive
from maecho.synthesis.correction import MAP_DRAWS, Correction
from maecho.synthesis.pseudo import PseudoInputs, draw
from support.clients import batches, network, rng
from support.tiny import refused, with_statistics
from support.tiny import upload as tiny_upload


def test_tokens_have_no_features() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    with pytest.warns(
        UserWarning, match="ann: not sent: features, since the inputs are not one tensor of real numbers"
    ):
        upload = maecho.make_upload(model, [torch.tensor([[0, 1], [2, 3]])], "ann", ["features"])
    assert upload.has == set()
    assert "not one tensor of real numbers" in upload.recipe["not_sent"]["features"]


def test_they_are_the_moments_of_what_reaches_the_layer_and_other_sums_do_not_notice() -> None:
    data = batches()
    upload = maecho.make_upload(network(), data, "ann", ["gram", "features"], rank=None)
    (name, found), (x, y) = (
        next(iter(upload.statistics["features"].items())),
        (torch.cat(part) for part in zip(*data, strict=True)),
    )
    rows = network()[:2](x).double().detach()
    assert name == "2"
    for k, label in enumerate(found.classes.tolist()):
        own = rows[y == label]
        assert int(found.counts[k]) == len(own)
        torch.testing.assert_close(found.means[k].double(), own.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found.covariances[k].dense()[0].double(), own.T.cov(correction=0), rtol=1e-4, atol=1e-5
        )
    bare = maecho.make_upload(network(), data, "ann", ["gram"], rank=None)
    for layer, gram in bare.statistics["gram"].items():
        torch.testing.assert_close(upload.statistics["gram"][layer].dense(), gram.dense(), rtol=0, atol=0)


def test_they_travel(tmp_path: Path) -> None:
    upload = maecho.make_upload(network(), batches(), "ann", rank="3x")
    upload.save(tmp_path / "ann.safetensors")
    back = maecho.Upload.load(tmp_path / "ann.safetensors")
    assert back.tensors().keys() == upload.tensors().keys()
    assert all(torch.equal(tensor, upload.tensors()[name]) for name, tensor in back.tensors().items())
    assert maecho.Upload.load(tmp_path / "ann.safetensors", only=["moments"]).statistics.get("features", {}) == {}
    assert upload.statistics["features"]["2"].residual is not None, (
        "cut to a size, what is lost of the variances is kept"
    )


def test_aligned_they_are_those_of_the_reference() -> None:
    """Features of permuted copies of one network on the same data agree after alignment."""
    model, data = network(), batches()
    other = network()
    spaces = derive(model, data[0][0])
    orders = {space.name: torch.randperm(space.size, generator=rng(space.size)) for space in spaces}
    other.load_state_dict(permute(other.state_dict(), spaces, orders))
    uploads = [maecho.make_upload(m, data, c, rank=None) for m, c in ((model, "ann"), (other, "bob"))]
    cut = [
        with_statistics(u, features={n: m.cut(lambda _: 2) for n, m in u.statistics["features"].items()})
        for u in uploads
    ]
    for one, two in (Alignment().align(uploads), Alignment().align(cut)):
        first, second = one.statistics["features"]["2"], two.statistics["features"]["2"]
        torch.testing.assert_close(first.means, second.means, rtol=1e-5, atol=1e-5)
        for a, b in zip(first.covariances, second.covariances, strict=True):
            torch.testing.assert_close(a.dense(), b.dense(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first.variances, second.variances, rtol=1e-4, atol=1e-4)
    soft = Alignment(transport="sinkhorn").align(cut)[1].statistics["features"]["2"]
    assert soft.means.isfinite().all()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda m: {"9": m}, ("ann: features must be of a layer of the network", "got features of '9'")),
        (lambda m: {"0": m}, ("ann: features of '0' must be of its 4 inputs", "got (5,)")),
        (lambda m: {"2": replace(m, means=m.means * torch.nan)}, ("ann: class means of '2'", "finite", "NaN")),
        (lambda m: {"2": replace(m, counts=m.counts + 1)}, ("ann: counts of the class moments of '2'", "got 33")),
        (
            lambda m: {"2": replace(m, classes=m.classes.clamp(max=1))},
            ("ann: features of '2'", "one Gaussian", "[0, 1, 1]"),
        ),
    ],
)
def test_what_is_wrong_is_named(change: Any, parts: tuple[str, ...]) -> None:
    with refused(*parts):
        with_statistics(tiny_upload(), features=change(tiny_upload().statistics["features"]["2"]))


def squares(seed: int, n: int = 600) -> tuple[Tensor, Tensor]:
    """Class 0 lies at the corners of a square, class 1 at those of a rotated square. Their Gaussians are the same."""
    g = rng(seed)
    y = torch.arange(n) % 2
    angle = 0.7854 * (2 * torch.randint(4, (n,), generator=g) + y)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.2 * torch.randn(n, 2, generator=g), y


def trained(seed: int, x: Tensor, y: Tensor) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))
    LocalTraining(epochs=30, learning_rate=0.1)(model, x, y, rng(seed))
    return model


def test_echo_chain_is_better_with_features_where_inputs_are_no_gaussians() -> None:
    data = [squares(seed) for seed in range(2)]
    models = [trained(seed, *data[seed]) for seed in range(2)]
    uploads = [maecho.make_upload(m, [d], f"{i}", rank=None) for i, (m, d) in enumerate(zip(models, data, strict=True))]
    right = {}
    for features in (False, True):
        merged = trained(0, *data[0])
        merged.load_state_dict(maecho.aggregate(uploads, "echo-chain", model=merged, features=features, draws=4000))
        right[features] = maecho.evaluate(merged, [squares(9)]).accuracy
    assert right[True] > right[False] + 0.2
    assert right[True] > 0.9


def test_one_client_comes_back_through_its_features() -> None:
    upload = maecho.make_upload(network(), batches(), "ann", rank=None)
    x = batches(5)[0][0]
    merged = network(3)
    merged.load_state_dict(maecho.aggregate([upload], "echo-chain", model=merged, draws=400))
    torch.testing.assert_close(merged(x), network()(x), rtol=1e-3, atol=1e-3)


def correction(upload: maecho.Upload, ridge: float = 0.0) -> Correction:
    assert upload.statistics.get("moments") is not None
    return Correction(
        PseudoInputs(upload.statistics["moments"], 2000, 100, dtype=torch.float64),
        "2",
        upload.statistics["features"]["2"],
        0,
        ridge,
    )


def test_the_map_of_features_is_fitted_on_more_draws_than_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = maecho.make_upload(network(dtype=torch.float64), batches(dtype=torch.float64), "ann", rank=None)
    seen: list[int] = []
    features_of = Correction._features_of

    def counted(self: Correction, net: nn.Module, x: Tensor) -> Tensor:
        seen.append(len(x))
        return features_of(self, net, x)

    monkeypatch.setattr(Correction, "_features_of", counted)
    correction(upload).fit_map(network(dtype=torch.float64), network(1, dtype=torch.float64))
    assert sum(seen) == 2 * MAP_DRAWS * 2000, "by both networks"
    assert MAP_DRAWS > 1


def test_layers_of_any_name_travel(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.ModuleDict({"a/b": nn.Linear(12, 4)})["a/b"], nn.ReLU())
    model.add_module("c/means", nn.Linear(4, 5))
    upload = maecho.make_upload(model, batches(), "ann")
    upload.save(tmp_path / "ann.safetensors")
    assert (
        maecho.Upload.load(tmp_path / "ann.safetensors").statistics["features"].keys()
        == upload.statistics["features"].keys()
        == {"c/means"}
    )


def test_where_networks_agree_features_follow_as_they_are() -> None:
    upload = maecho.make_upload(network(dtype=torch.float64), batches(dtype=torch.float64), "ann", rank=None)
    M = correction(upload, 1e-3).fit_map(network(dtype=torch.float64), network(dtype=torch.float64))
    torch.testing.assert_close(M, torch.eye(9, dtype=torch.float64), rtol=0, atol=1e-8)


def test_features_follow_a_linear_change_of_the_network() -> None:
    """The merged network's features are A f. After the features f are replaced, they still are."""
    own = nn.Sequential(nn.Linear(12, 9), nn.Identity(), nn.Linear(9, 5)).double()
    A = torch.randn(9, 9, generator=rng(3), dtype=torch.float64)
    merged = nn.Sequential(nn.Linear(12, 9), nn.Identity(), nn.Linear(9, 5)).double()
    with torch.no_grad():
        merged[0].weight.copy_(A @ own[0].weight)
        merged[0].bias.copy_(A @ own[0].bias)
    upload = maecho.make_upload(own, batches(dtype=torch.float64), "ann", rank=None)
    put_right = correction(upload)
    torch.testing.assert_close(put_right.fit_map(own, merged), A, rtol=0, atol=1e-6)
    got: dict[str, list[Tensor]] = {"own": [], "merged": []}
    labels = []
    with put_right.applied(own, merged):
        handles = [
            net[2].register_forward_pre_hook(lambda m, a, n=name: got[n].append(a[0]))
            for name, net in (("own", own), ("merged", merged))
        ]
        for x, y in put_right:
            own(x)
            merged(x)
            labels.append(y)
    for handle in handles:
        handle.remove()
    f, h, y = torch.cat(got["own"]), torch.cat(got["merged"]), torch.cat([one for one in labels if one is not None])
    torch.testing.assert_close(h, f @ A.T, rtol=0, atol=1e-5)
    uploaded = upload.statistics["features"]["2"]
    for k, label in enumerate(uploaded.classes.tolist()):
        spread = uploaded.variances[k].sqrt() / (y == label).sum().sqrt()
        assert bool(((f[y == label].mean(0) - uploaded.means[k]).abs() < 5 * spread).all())
    assert not own[2]._forward_pre_hooks, "nothing stays behind"


@pytest.mark.parametrize("kept", [True, False])
def test_the_map_of_features_is_fitted_once_for_each_client_if_there_is_memory(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = [maecho.make_upload(network(seed), batches(seed), f"{seed}", rank=None) for seed in range(3)]
    found: list[Correction] = []
    plain, whole = Correction.fit_map, maecho.aggregate(uploads, "echo-chain", model=network(), draws=300)

    def counted(self: Correction, own: nn.Module, merged: nn.Module) -> Tensor:
        found.append(self)
        return plain(self, own, merged)

    monkeypatch.setattr(Correction, "fit_map", counted)
    monkeypatch.setattr(simulated, "MAP_MEMORY", 3 * 9 * 9 * 4 - (0 if kept else 1))
    again = maecho.aggregate(uploads, "echo-chain", model=network(), draws=300)
    assert len(found) == (3 if kept else 6), "two layers are behind the features"
    assert all(torch.equal(tensor, whole[name]) for name, tensor in again.items())


def test_what_is_cut_off_is_kept_in_the_coordinates_that_suit_it() -> None:
    """Smooth images keep the residual in cosines, independent pixels in pixels. In both cases no variance is lost."""
    smooth = torch.nn.functional.interpolate(torch.randn(400, 2, 3, 3, generator=rng()), size=8, mode="bilinear")
    speckled = torch.randn(400, 2, 8, 8, generator=rng()) * torch.rand(2, 8, 8, generator=rng(1)).round()
    for x, expected in ((smooth, True), (speckled, False)):
        upload = maecho.make_upload(nn.Sequential(nn.Flatten(), nn.Linear(128, 2)), [x], "ann", ["moments"], rank=None)
        whole = upload.statistics["moments"]
        assert whole is not None
        cut = whole.cut(lambda _: 4)
        assert cut.in_cosines is expected
        assert cut.cut(lambda _: 2).in_cosines is expected
        torch.testing.assert_close(cut.variances.sum(), whole.variances.sum(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cut.cut(lambda _: 2).variances.sum(), whole.variances.sum(), rtol=1e-5, atol=1e-5)
        drawn = draw(cut, 0, 20_000, rng(2), torch.float64).flatten(1)
        torch.testing.assert_close(drawn.var(0), cut.variances[0], rtol=0.1, atol=1e-3)


def test_cosines_travel(tmp_path: Path) -> None:
    smooth = torch.nn.functional.interpolate(torch.randn(50, 1, 3, 3, generator=rng()), size=6, mode="bilinear")
    upload = maecho.make_upload(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), [smooth], "ann", ["moments"], rank=2)
    assert upload.statistics.get("moments") is not None
    assert upload.statistics["moments"].in_cosines
    upload.save(tmp_path / "a.safetensors")
    back = maecho.Upload.load(tmp_path / "a.safetensors").statistics["moments"]
    assert isinstance(back, Gaussians)
    assert back.in_cosines
    torch.testing.assert_close(back.variances, upload.statistics["moments"].variances, rtol=0, atol=0)
