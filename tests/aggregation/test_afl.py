"""AFL against ridge regression on all the data in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import maecho
from maecho.upload.client import make_upload
from support.clients import batches, network, rng
from support.tiny import refused

STATISTICS = ["gram", "targets"]
X, Y = (torch.cat(part) for part in zip(*batches(0, 5, dtype=torch.float64), strict=True))


def client(name: str, which: Tensor, bias: bool = True, backbone: int = 0, rank: int | None = None) -> maecho.Upload:
    """A client with its own head on the common backbone."""
    model = network(backbone, torch.float64, bias)
    with torch.no_grad():
        for p in model[4].parameters():
            p.copy_(torch.randn(p.shape, generator=rng(sum(name.encode())), dtype=torch.float64))
    return make_upload(model, zip(X[which].split(7), Y[which].split(7), strict=True), name, STATISTICS, rank=rank)


def pooled(ridge: float, bias: bool = True) -> Tensor:
    """[W b] by ridge regression on all the data in one place."""
    H = network(0, torch.float64, bias)[:4](X).detach()
    H = torch.cat([H, torch.ones(len(H), 1)], 1) if bias else H
    G = H.T @ H
    return torch.linalg.solve(damped(G, ridge, bias), H.T @ nn.functional.one_hot(Y, 5).double()).T


def damped(G: Tensor, ridge: float, bias: bool = True) -> Tensor:
    """The data get a share of their mean eigenvalue, and so does the constant of the bias."""
    gamma = G.diagonal().clone()
    gamma[: len(G) - bias] = gamma[: len(G) - bias].mean()
    return G + ridge * gamma.diag()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=len(X), max_size=len(X)), st.sampled_from([1e-6, 1e-3, 1.0]), st.booleans())
def test_any_partition_gives_the_pooled_head(owners: list[int], ridge: float, bias: bool) -> None:
    owner = torch.tensor(owners)
    uploads = [client(f"c{i}", (owner == i).nonzero().squeeze(1), bias) for i in sorted(set(owners))]
    merged = maecho.aggregate(uploads, "afl", ridge=ridge)
    expected = pooled(ridge, bias)
    torch.testing.assert_close(merged["4.weight"], expected[:, :7], rtol=1e-6, atol=1e-6)
    if bias:
        torch.testing.assert_close(merged["4.bias"], expected[:, 7], rtol=1e-6, atol=1e-6)
    for name in ("0.weight", "2.weight"):
        torch.testing.assert_close(merged[name], uploads[0].weights[name])


def test_targets_are_the_sums_by_class() -> None:
    upload = client("a", torch.arange(len(X)))
    H = network(0, torch.float64)[:4](X).detach()
    for label in range(5):
        own = H[label == Y]
        torch.testing.assert_close(upload.statistics["targets"][label, :7], own.sum(0))  # type: ignore[index]
        assert float(upload.statistics["targets"][label, 7]) == pytest.approx(len(own))  # type: ignore[index]


def test_without_a_ridge_it_is_least_squares() -> None:
    half = torch.arange(len(X)) < 30
    uploads = [client("a", half.nonzero().squeeze(1)), client("b", (~half).nonzero().squeeze(1))]
    merged = maecho.aggregate(uploads, "afl", ridge=0.0)
    torch.testing.assert_close(merged["4.weight"], pooled(0.0)[:, :7], rtol=1e-6, atol=1e-6)


def test_a_gram_that_was_cut_is_a_regression_on_the_directions_that_are_left() -> None:
    halves = [torch.arange(0, 40), torch.arange(40, 80)]
    uploads = [client(f"c{i}", half, rank=2) for i, half in enumerate(halves)]
    G, T = torch.zeros(8, 8).double(), torch.zeros(5, 8).double()
    for half in halves:
        H = network(0, torch.float64)[:4](X[half]).detach()
        H = torch.cat([H, torch.ones(len(H), 1)], 1)
        H[:, -1] = c = H[:, :-1].square().mean().sqrt()  # the Gram is cut where the constant is as large as the data
        U = torch.linalg.svd(H, full_matrices=False).Vh[:2].T
        H = H @ U @ U.T
        H[:, -1] /= c
        G, T = G + H.T @ H, T + nn.functional.one_hot(Y[half], 5).double().T @ H
    expected = torch.linalg.solve(damped(G, 1e-3), T.T).T
    merged = maecho.aggregate(uploads, "afl")
    torch.testing.assert_close(merged["4.weight"], expected[:, :7], rtol=1e-6, atol=1e-6)


def test_a_backbone_that_is_not_shared() -> None:
    uploads = [client("ann", torch.arange(40)), client("bob", torch.arange(40, 80), backbone=1)]
    with refused(
        "bob", "afl needs a backbone that all clients share", "'0.weight'", "as in ann", "got one that differs"
    ):
        maecho.aggregate(uploads, "afl")
    merged, average = maecho.aggregate(uploads, "afl", backbone="average"), maecho.aggregate(uploads, "fedavg")
    torch.testing.assert_close(merged["0.weight"], average["0.weight"])
    assert not torch.allclose(merged["4.weight"], average["4.weight"])
    assert merged.averaged == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_running_statistics_belong_to_the_backbone_and_counters_do_not() -> None:
    def one(name: str, mean: float, count: int) -> maecho.Upload:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).double()
        model[1].running_mean.fill_(mean)
        model[1].num_batches_tracked.fill_(count)
        return make_upload(model, [(X, Y)], name, STATISTICS, rank=None)

    with torch.random.fork_rng():
        maecho.aggregate([one("ann", 1.0, 3), one("bob", 1.0, 4)], "afl")
        with refused("bob", "'1.running_mean'", "as in ann", "differs by 1"):
            maecho.aggregate([one("ann", 1.0, 3), one("bob", 2.0, 3)], "afl")


def test_the_order_and_the_files_do_not_matter(tmp_path: Path) -> None:
    uploads = [client(f"c{i}", torch.arange(i, 80, 3)) for i in range(3)]
    for upload in uploads:
        upload.save(tmp_path / f"{upload.client}.safetensors")
    paths = sorted(tmp_path.glob("*.safetensors"))
    one, other = maecho.aggregate(uploads, "afl"), maecho.aggregate(paths[::-1], "afl")
    for key in one:
        torch.testing.assert_close(one[key], other[key])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(12, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.head(self.one(x)))


@pytest.mark.parametrize(
    ("model", "labels", "why"),
    [
        (Twice(), True, "the last layer does not run exactly once, on one row for each example"),
        (
            nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 10), nn.GLU()),
            True,
            "no last layer with one row for each class",
        ),
        (nn.Sequential(nn.Linear(12, 6), nn.Unflatten(1, (2, 3))), True, "not one row of class scores"),
        (network(), False, "no whole-number label for every example"),
    ],
)
def test_when_there_are_no_targets_the_upload_says_why(model: nn.Module, labels: bool, why: str) -> None:
    x, y = X.float(), Y % 3
    with pytest.warns(UserWarning, match="ann: not sent: "):
        upload = make_upload(model, [(x, y)] if labels else [x], "ann", STATISTICS)
    assert upload.statistics.get("targets") is None
    assert why in upload.recipe["not_sent"]["targets"]
    with refused("ann", "afl needs the statistic 'targets'"):
        maecho.aggregate([upload], "afl")


def test_where_nothing_is_known_the_average_stands() -> None:
    uploads = [client(f"c{i}", torch.arange(i, 80, 2), rank=0) for i in range(2)]
    merged = maecho.aggregate(uploads, "afl")
    torch.testing.assert_close(merged["4.weight"], maecho.aggregate(uploads, "fedavg")["4.weight"])
    assert set(merged.averaged) == set(uploads[0].weights)


def test_a_client_may_lack_classes() -> None:
    uploads = [client("a", (Y < 2).nonzero().squeeze(1)), client("b", (Y >= 2).nonzero().squeeze(1))]
    merged = maecho.aggregate(uploads, "afl")
    torch.testing.assert_close(merged["4.weight"], pooled(1e-3)[:, :7], rtol=1e-6, atol=1e-6)
