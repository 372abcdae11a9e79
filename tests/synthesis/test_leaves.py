"""White noise with edges: it is exactly white and not Gaussian, and inputs drawn from it have the uploaded moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.echo.simulated import Drawing
from maecho.linalg import cosines
from maecho.linalg.gaussians import Gaussians
from maecho.synthesis import leaves
from maecho.synthesis.pseudo import NOISES, Noise, draw
from support.clients import rng

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 10)])
def test_over_all_places_the_covariance_is_the_identity(shape: tuple[int, int, int]) -> None:
    white = leaves.whiten(leaves.paint(40, shape, rng()))
    moved = torch.cat([white.roll((i, j), (2, 3)) for i in range(shape[1]) for j in range(shape[2])]).flatten(1)
    torch.testing.assert_close(moved.T @ moved / len(moved), torch.eye(moved.shape[1]).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(moved.mean(0), torch.zeros(moved.shape[1]).double(), rtol=0, atol=1e-6)


def test_few_colours_are_no_trouble() -> None:
    """Channels that are always equal leave directions without variance."""
    gray = leaves.paint(30, (1, 8, 8), rng()).expand(-1, 3, -1, -1)
    assert leaves.whiten(gray).isfinite().all()


def test_it_has_edges() -> None:
    """A Gaussian's fourth moment is 3. Edges lie near other edges, so the sizes of neighbouring numbers go together."""
    w = leaves.draw_white((3, 32, 32), 500, rng(), CPU)
    assert float((w**4).mean() / (w**2).mean() ** 2) > 5
    square = (w.reshape(500, 3, 32, 32) ** 2).mean(1)
    beside = torch.stack([square[:, :, 1:].flatten(), square[:, :, :-1].flatten()])
    assert float(torch.corrcoef(beside)[0, 1]) > 0.2


def test_draws_are_those_of_the_generator() -> None:
    one, again, other = (leaves.draw_white((1, 8, 8), 50, rng(seed), CPU) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len(one.unique(dim=0)) == 50, "all different"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 32, 32), True),
        ((1, 8, 9), True),
        ((1, 7, 32), False),
        ((32, 32, 3), False),
        ((28, 28), False),
        ((784,), False),
        ((1, 3, 32, 32), False),
    ],
)
def test_what_is_an_image(shape: tuple[int, ...], expected: bool) -> None:
    assert leaves.is_image(shape) is expected


def moments_of(x: Tensor, rank: int | None = None) -> Gaussians:
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 2))
    found = maecho.make_upload(model, [x], "ann", ["moments"], rank=rank).statistics["moments"]
    assert found is not None
    return found


def smooth(n: int = 600) -> Tensor:
    return nn.functional.interpolate(torch.randn(n, 2, 4, 4, generator=rng()), size=8, mode="bilinear")


@pytest.mark.parametrize("noise", NOISES)
def test_drawn_inputs_have_the_uploaded_covariance(noise: Noise) -> None:
    m = moments_of(smooth())
    x = draw(m, 0, 40_000, rng(1), torch.float64, noise).flatten(1)
    expected = m.covariances[0].dense()[0].double()
    error = torch.linalg.matrix_norm(x.T.cov() - expected) / torch.linalg.matrix_norm(expected)
    assert float(error) < 0.08
    torch.testing.assert_close(x.mean(0), m.means[0].double(), rtol=0, atol=0.05)


@pytest.mark.parametrize("in_cosines", [True, False])
@pytest.mark.parametrize("noise", NOISES)
def test_of_what_is_cut_off_the_variances_are_right(noise: Noise, in_cosines: bool) -> None:
    """The residual variances come back in the coordinates in which they were uploaded."""
    speckled = torch.randn(600, 2, 8, 8, generator=rng()) * torch.rand(2, 8, 8, generator=rng(1))
    m = moments_of(smooth() if in_cosines else speckled, rank=6)
    assert m.in_cosines is in_cosines
    assert m.residual is not None
    x, directions = draw(m, 0, 40_000, rng(2), torch.float64, noise).flatten(1), m.covariances[0].basis
    assert directions is not None
    rows = directions[0].double().mT
    if in_cosines:
        x, rows = cosines.forth(x, m.shape), cosines.forth(rows, m.shape)
    expected = m.covariances[0].values[0] @ rows**2 + m.residual[0]
    torch.testing.assert_close(x.var(0), expected, rtol=0.1, atol=1e-3)


def test_what_is_no_image_is_gaussian() -> None:
    m = moments_of(torch.randn(50, 12, generator=rng()))
    one, other = (draw(m, 0, 20, rng(3), torch.float32, noise) for noise in NOISES)
    assert torch.equal(one, other)


def test_it_is_the_same_whatever_the_default_dtype() -> None:
    one = leaves.paint(3, (1, 8, 8), rng())
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(leaves.paint(3, (1, 8, 8), rng()), one)
    finally:
        torch.set_default_dtype(torch.float32)


def pictures(seed: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4), nn.ReLU(), nn.Linear(4, 2)
        )
    return model, [(smooth(60) + seed, torch.arange(60) % 2)]


@pytest.mark.parametrize("rounds", [1, 2])
def test_images_are_drawn_with_edges_unless_asked_otherwise(rounds: int) -> None:
    pairs = [pictures(1), pictures(2)]

    def merged(drawing: Drawing | None) -> Tensor:
        return maecho.relay(pictures(0)[0], pairs, rounds=rounds, drawing=drawing)["0.weight"]

    plain, edges, gaussian = merged(None), merged(Drawing(noise="leaves")), merged(Drawing(noise="gaussian"))
    assert torch.equal(plain, edges)
    assert not torch.allclose(plain, gaussian, rtol=1e-3)
    uploads = [maecho.make_upload(*pair, f"client {i}", rank=None) for i, pair in enumerate(pairs)]
    whole = maecho.aggregate(uploads, "echo-chain", model=pictures(0)[0])["0.weight"]
    other = maecho.aggregate(uploads, "echo-chain", model=pictures(0)[0], noise="gaussian")["0.weight"]
    assert torch.equal(whole, plain)
    assert torch.equal(other, gaussian)


def test_the_recipe_of_a_relay_says_what_was_drawn() -> None:
    pairs = [pictures(1), pictures(2)]
    drawn = maecho.relay(pictures(0)[0], pairs, rounds=2, drawing=Drawing(draws=77)).recipe["options"]
    assert "Drawing(draws=77" in drawn
    assert "Drawing" not in maecho.relay(pictures(0)[0], pairs).recipe["options"]


def test_another_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="noise must be one of leaves, gaussian, got 'pink'"):
        maecho.aggregate([], "echo-chain", noise="pink")
