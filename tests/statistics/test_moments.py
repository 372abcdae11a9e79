"""Several Gaussians for a class, or one covariance for all: the moments of the data as a whole must stay right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.linalg.gaussians import NO_CLASS, Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.linalg.sums.scatter import SKETCH
from maecho.linalg.symmetric import Diagonal
from maecho.statistics.moments import CLUSTERED, ClassScatter, centres
from maecho.synthesis.pseudo import PseudoInputs, seed_for
from support.clients import batches, network, rng
from support.tiny import QUICK, refused_input


def clouds(n: int = 90, d: int = 4, parts: int = 3, apart: float = 50.0) -> tuple[Tensor, Tensor]:
    """Points in clouds that lie far apart, and the cloud of each point."""
    which = torch.arange(n) % parts
    return torch.randn(n, d, generator=rng(1)).double() + apart * torch.eye(d)[which], which


def moments_of(data: list[Any], **options: Any) -> Gaussians:
    upload = maecho.make_upload(network(), data, "ann", ["moments", "classes"], rank=None, **options)
    assert upload.statistics.get("moments") is not None
    return upload.statistics["moments"]


def overall(m: Gaussians) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the mixture."""
    share = (m.counts / m.counts.sum()).double()
    mean, means = share @ m.means.double(), m.means.double()
    inner = torch.cat([c.dense() for c in m.covariances]).double().expand(len(share), -1, -1)
    return mean, torch.einsum("k,kde->de", share, inner) + (means - mean).T @ ((means - mean) * share[:, None])


@pytest.mark.parametrize("covariance", ["class", "shared"])
@pytest.mark.parametrize("gaussians", [1, 3, 100])
def test_the_mixture_has_the_mean_and_covariance_of_the_data(gaussians: int, covariance: Any) -> None:
    data = batches()
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    m = moments_of(data, gaussians=gaussians, covariance=covariance)
    assert int(m.counts.sum()) == len(x)
    assert len(m.covariances) == (1 if covariance == "shared" else len(m.classes))
    for label in range(5):
        assert int(m.counts[m.classes == label].sum()) == int((y == label).sum())
        assert int((m.classes == label).sum()) <= gaussians
    mean, spread = overall(m)
    torch.testing.assert_close(mean, x.double().mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spread, x.double().T.cov(correction=0), rtol=1e-5, atol=1e-5)


def test_k_means_finds_clouds() -> None:
    x, which = clouds()
    found = centres(x, 3)
    nearest = torch.cdist(x, found).argmin(1)
    for k in range(3):
        assert len(nearest[which == k].unique()) == 1
    assert len(nearest.unique()) == 3
    assert torch.equal(centres(x, 3), found)  # nothing is left to chance


@pytest.mark.parametrize("n", [90, CLUSTERED + 400])
def test_every_cloud_gets_its_gaussian_also_after_the_centres_are_settled(n: int) -> None:
    x, which = clouds(n)
    scatter = ClassScatter(gaussians=3)
    for part in x.split(70):
        scatter.add(part, torch.zeros(len(part), dtype=torch.int64))
    m = scatter.moments()
    assert m.classes.tolist() == [0, 0, 0]
    assert sorted(m.counts.tolist()) == sorted(which.bincount().tolist())
    own = {k: x[which == k].mean(0) for k in range(3)}
    assert all(min(float((mean - c).norm()) for c in own.values()) < 1e-9 for mean in m.means)


def test_fewer_different_examples_than_gaussians() -> None:
    x = torch.tensor([[1.0, 2], [1, 2], [3, 4]]).double()
    scatter = ClassScatter(gaussians=4)
    scatter.add(x, None)
    m = scatter.moments()
    assert m.classes.unique().tolist() == [NO_CLASS]
    assert sorted(m.counts.tolist()) == [1, 2]
    assert [c.rank for c in m.covariances] == [0, 0]
    assert [len(inputs) for inputs, _ in PseudoInputs(m, 3)] == m.counts.tolist()


def test_every_class_has_directions_of_its_own_number(tmp_path: Path) -> None:
    """A class of one example has no covariance. Its room in the upload goes to other classes."""
    x = torch.randn(201, 12, generator=rng(5))
    for lonely in (True, False):
        y = torch.zeros(201, dtype=torch.int64)
        y[-1] = int(lonely)
        upload = maecho.make_upload(network(), [(x, y)], "ann", ["moments"], rank="1400 B")
        assert upload.statistics.get("moments") is not None
        ranks = [c.rank for c in upload.statistics["moments"].covariances]
        assert ranks == ([4, 0] if lonely else [6]), "a mean and its variances are the price of two"
        upload.save(tmp_path / "ann.safetensors")
        back = maecho.Upload.load(tmp_path / "ann.safetensors").statistics["moments"]
        assert back is not None
        assert [c.rank for c in back.covariances] == ranks


def test_covariances_are_one_matrix_each() -> None:
    whole = moments_of(batches())
    c = whole.covariances[0]
    assert c.basis is not None
    for odd in (
        Spectrum(c.values[0].expand(2, -1), c.basis.expand(2, -1, -1)),
        Diagonal(torch.ones(1, 12)),
    ):
        with pytest.raises(ValueError, match="one matrix each"):
            replace(whole, covariances=(odd,))


def test_long_inputs_are_sketched_with_the_same_trace() -> None:
    x = torch.randn(40, 1100, generator=rng(2)).double()
    for covariance in ("class", "shared"):
        scatter = ClassScatter(2, covariance)  # type: ignore[arg-type]
        scatter.add(x, torch.arange(40) % 2)
        m = scatter.moments()
        share = (m.counts / m.counts.sum()).double()
        between = ((m.means - share @ m.means) ** 2).sum(-1)
        within = torch.stack([c.values.sum() for c in m.covariances])
        trace = float(share @ (within + between))
        assert trace == pytest.approx(float(x.var(0, correction=0).sum()))


@pytest.mark.parametrize("covariance", ["class", "shared"])
@pytest.mark.parametrize("shape", [(1100,), (1, 33, 34)])
def test_of_long_inputs_no_variance_is_lost(shape: tuple[int, ...], covariance: Any) -> None:
    """The data have more directions than a sketch holds."""
    scale = torch.rand(shape, generator=rng(3)) + 0.1
    x = torch.randn(1500, *shape, generator=rng(4)) * scale
    scatter = ClassScatter(covariance=covariance)
    for piece, labels in zip(x.split(100), (torch.arange(1500) % 2).split(100), strict=True):
        scatter.add(piece, labels)
    m = scatter.moments()
    assert max(c.rank for c in m.covariances) <= SKETCH
    truth = torch.stack([x[k::2].flatten(1).double().var(0, correction=0) for k in range(2)])
    truth = truth if covariance == "class" else truth.mean(0, keepdim=True)
    torch.testing.assert_close(m.variances.sum(1), truth.sum(1), rtol=1e-6, atol=0)
    if not m.in_cosines:
        torch.testing.assert_close(m.variances, truth, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"gaussians": 3}, {"covariance": "shared"}, {"gaussians": 2, "covariance": "shared"}]
)
def test_a_file_holds_them(options: dict[str, Any], tmp_path: Path) -> None:
    upload = maecho.make_upload(network(), batches(), "ann", **options)
    upload.save(tmp_path / "ann.safetensors")
    loaded = maecho.Upload.load(tmp_path / "ann.safetensors")
    assert loaded.statistics.get("moments") is not None
    assert upload.statistics.get("moments") is not None
    assert loaded.statistics["moments"].shape == upload.statistics["moments"].shape
    assert loaded.tensors().keys() == upload.tensors().keys()
    assert all(torch.equal(t, loaded.tensors()[k]) for k, t in upload.tensors().items())
    assert f"Gaussians a class: {options.get('gaussians', 1)}" in loaded.recipe["moments"]
    shared = maecho.make_upload(network(), batches(), "ann", gaussians=options.get("gaussians", 1))
    assert shared.statistics.get("moments") is not None
    assert upload.statistics["moments"].bytes <= shared.statistics["moments"].bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gaussians": 0}, ("gaussians must be a whole number, at least 1", "got 0")),
        ({"gaussians": True}, ("gaussians", "got True")),
        ({"gaussians": 2.5}, ("gaussians", "got 2.5")),
        ({"covariance": "none"}, ("covariance must be one of class, shared", "got 'none'")),
    ],
)
def test_bad_values(options: dict[str, Any], said: tuple[str, ...]) -> None:
    with refused_input("ann", *said):
        maecho.make_upload(network(), batches(), "ann", **options)


def test_dense_takes_them_too() -> None:
    """DENSE uses only the spread of all the data, which stays the same."""
    uploads = [
        maecho.make_upload(network(i), batches(i), f"{i}", ["moments"], gaussians=2, covariance="shared", rank=None)
        for i in range(2)
    ]
    merged = maecho.aggregate(uploads, "dense", model=network(), **QUICK["dense"])
    assert all(t.isfinite().all() for t in merged.values())


class TestPseudoInputs:
    """Draws have the moments from which they are drawn."""

    def test_their_moments(self) -> None:
        m = moments_of(batches(), gaussians=2)
        drawn = list(PseudoInputs(m, 200_000, chunk=1000))
        x, y = (torch.cat(part).double() for part in zip(*drawn, strict=True))  # type: ignore[arg-type]
        mean, spread = overall(m)
        torch.testing.assert_close(x.mean(0), mean, rtol=0.02, atol=0.02)
        torch.testing.assert_close(x.T.cov(correction=0), spread, rtol=0.05, atol=0.05)
        assert len(x) == pytest.approx(200_000, abs=len(m.classes))
        for label in range(5):
            share = int(m.counts[m.classes == label].sum()) / int(m.counts.sum())
            assert int((y == label).sum()) / len(y) == pytest.approx(share, abs=1e-3)

    def test_they_come_again_and_nothing_global_changes(self) -> None:
        m, state = moments_of(batches()), torch.get_rng_state()
        inputs = PseudoInputs(m, 100, chunk=7, seed=3)
        one, two = ([x for x, _ in inputs] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert max(map(len, one)) <= 7
        other = [x for x, _ in PseudoInputs(m, 100, chunk=7, seed=4)]
        assert not torch.equal(one[0], other[0])

    def test_no_gaussian_is_left_out_and_shapes_are_kept(self) -> None:
        images = [(torch.randn(10, 1, 3, 4, generator=rng(1)), torch.arange(10) % 5)]
        model = nn.Sequential(nn.Flatten(), network())
        m = maecho.make_upload(model, images, "ann", ["moments"], rank=None).statistics["moments"]
        assert m is not None
        drawn = list(PseudoInputs(m, 1, dtype=torch.float64))
        assert [int(y) for _, y in drawn if y is not None] == [0, 1, 2, 3, 4]
        assert {x.shape for x, _ in drawn} == {(1, 1, 3, 4)}
        assert {x.dtype for x, _ in drawn} == {torch.float64}

    def test_streams_by_name(self) -> None:
        assert len({seed_for(s, c) for s in range(5) for c in ("a", "b", "1/a")}) == 15
        assert seed_for(1, "a") == seed_for(1, "a")
