"""Statistics move with the neurons: carried over, they are what the carried-over network says of the same data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from maecho import Upload, make_upload
from maecho.alignment.transport import moved
from maecho.linalg.gaussians import Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.network.spaces import Move, permute
from maecho.network.tracing import derive
from maecho.statistics import STATISTICS
from support.clients import batches, network, rng
from support.networks import NETWORKS, with_running_statistics
from support.values import close


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("architecture", NETWORKS)
def test_of_a_permuted_network_they_are_the_permuted_ones(architecture: str, name: str) -> None:
    make, shape = NETWORKS[architecture]
    x = torch.randn((20, *shape[1:]), generator=rng())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, other = with_running_statistics(make(), x).double(), make().eval().double()
    data, spaces = [(x.double(), torch.arange(20) % 4)], derive(model, x.double())
    orders = {space.name: torch.randperm(space.size, generator=rng(space.size)) for space in spaces}
    other.load_state_dict(permute(model.state_dict(), spaces, orders))
    before, after = (make_upload(one, data, "ann", [name], rank=None) for one in (model, other))
    if name not in after.statistics:
        pytest.skip(f"{architecture} gives no {name}")
    carried = before
    for space in spaces:
        carried = moved(carried, Move(space, torch.eye(space.size, dtype=torch.float64)[orders[space.name]]))
    assert close(carried.statistics[name], after.statistics[name], 1e-6, 1e-6)
    if name not in ("classes", "moments"):
        assert not close(before.statistics[name], after.statistics[name]), "a law of everything says nothing"


def features_of(upload: Upload) -> Gaussians:
    (found,) = upload.statistics["features"].values()
    assert isinstance(found, Gaussians)
    return found


def test_mixed_neurons_mix_variances_by_the_squares() -> None:
    """Where M mixes neurons, what is left of the variances becomes M² times itself, entry by entry."""
    upload = make_upload(network(), batches(), "ann", ["moments", "features"], rank=None)
    (layer,) = upload.statistics["features"]
    kept = features_of(upload).cut(lambda spectrum: 0)
    assert kept.residual is not None
    upload = replace(upload, statistics={**upload.statistics, "features": {layer: kept}})
    assert upload.spaces is not None
    space = next(s for s in upload.spaces if any((p.tensor, p.axis) == (f"{layer}.weight", 1) for p in s.places))
    M = torch.rand(space.size, space.size, generator=rng(1), dtype=torch.float64)
    M = M / M.sum(1, keepdim=True)
    after = features_of(moved(upload, Move(space, M)))
    assert after.residual is not None
    torch.testing.assert_close(after.residual, (kept.residual.double() @ M.T**2).to(kept.residual))
    torch.testing.assert_close(after.means, (kept.means.double() @ M.T).to(kept.means))
    assert all(isinstance(covariance, Spectrum) and covariance.rank == 0 for covariance in after.covariances)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["gram", "gradients"])
def test_the_rest_of_a_cut_matrix_moves_with_the_neurons(name: str, mixed: bool) -> None:
    """A permutation leaves it as it is; where neurons are mixed, it becomes part of the matrix."""
    upload = make_upload(network().double(), batches(dtype=torch.float64), "ann", [name], rank=1)
    whole = {layer: spectrum.completed() for layer, spectrum in upload.statistics[name].items()}
    assert upload.spaces is not None
    for space in upload.spaces:
        M = torch.eye(space.size, dtype=torch.float64)[torch.randperm(space.size, generator=rng(1))]
        M = (M + 0.5) / (1 + 0.5 * space.size) if mixed else M
        carried, expected = (
            moved(one, Move(space, M)).statistics[name] for one in (upload, replace(upload, statistics={name: whole}))
        )
        for layer, spectrum in carried.items():
            torch.testing.assert_close(spectrum.dense(), expected[layer].dense())
            assert mixed or torch.equal(spectrum.rest, upload.statistics[name][layer].rest)
