"""Our merges against the plain formulas of benchmarks/peer_merges.py, and the reasons why those of peers differ.

Where FusionBench is installed (`make peers`), every reason that its table gives is tested against FusionBench itself.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import maecho
import other_merges
import peer_merges as plain
import peer_rows
import peers
from maecho.aggregation import Fisher, RegMean


@pytest.fixture(scope="module")
def case() -> plain.Case:
    return plain.mlps(3, 64, (8, 6, 5, 4))


def test_an_average_is_the_plain_one(case: plain.Case) -> None:
    assert plain.distance(maecho.aggregate(case.uploads, "fedavg"), plain.plain_average(case.weights)) < 1e-7


@pytest.mark.parametrize("shrink", [1.0, 0.9])
def test_regmean_is_the_plain_one(case: plain.Case, shrink: float) -> None:
    grams = plain.ridged(case.grams(torch.float64))
    found = maecho.aggregate(plain.with_gram(case.uploads, grams), RegMean(ridge=0, shrink=shrink))
    wanted = plain.plain_regmean(case.weights, grams, case.matrices, shrink=shrink)
    assert plain.distance(found, wanted) < 1e-6
    assert plain.distance(found, plain.plain_average(case.weights)) > 1e-3


def test_regmean_with_its_ridge_is_the_plain_one(case: plain.Case) -> None:
    """No layer here has a bias, so all of a Gram is data, and there is one ridge."""
    found = maecho.aggregate(case.uploads, "regmean")
    wanted = plain.plain_regmean(case.weights, case.grams(torch.float64), case.matrices, RegMean().ridge)
    assert plain.distance(found, wanted) < 2e-7


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_fisher_is_the_plain_one(case: plain.Case, ridge: float) -> None:
    found = maecho.aggregate(case.uploads, Fisher(ridge=ridge))
    wanted = plain.plain_fisher(case.weights, case.fishers(), ridge)
    assert plain.distance(found, wanted) < 2e-7
    assert plain.distance(found, plain.plain_average(case.weights)) > 1e-3


def test_the_treated_fisher_values_are_those_of_the_formula(case: plain.Case) -> None:
    fishers = case.fishers()
    treated = plain.as_fusionbench_weighs(fishers)
    factors = [1 / (torch.cat([F.flatten() for F in one.values()]).norm() + 1e-6) for one in fishers]
    for one, own, factor in zip(fishers, treated, factors, strict=True):
        for name, F in one.items():
            torch.testing.assert_close(own[name].float(), (F + 1e-6) * factor / sum(factors), rtol=1e-5, atol=0)


def test_the_gathered_fisher_values_square_a_whole_batch(case: plain.Case) -> None:
    """Two batches of one example give other values than one batch of two."""
    model, batch = case.models[0], case.data[0][0]
    apart = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(2)]
    together = [{name: tensor[:2] for name, tensor in batch.items()}]
    one, two = plain.as_fusionbench_gathers(model, apart), plain.as_fusionbench_gathers(model, together)
    assert plain.distance(one, two) > 0.1
    name = next(iter(one))
    by_hand = torch.zeros_like(one[name])
    for own in apart:
        total = torch.zeros_like(by_hand)
        for label in range(4):
            logs = model(input=own["input"]).logits.log_softmax(-1)[0]
            (g,) = torch.autograd.grad(logs[label], [dict(model.named_parameters())[name]])
            total += logs[label].detach().exp().sqrt() * g
        by_hand += total**2 / 2
    torch.testing.assert_close(one[name], by_hand)


def test_an_upload_of_matrices_alone_has_no_constant_input() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    upload = maecho.make_upload(model, [x], "ann", ["gram"], rank=None, progress=False)
    bare = plain.matrices_only(upload)
    assert [layer.bias for layer in bare.layers] == [None, None]
    torch.testing.assert_close(bare.statistics["gram"]["0"].dense()[0], x.T @ x, rtol=1e-5, atol=1e-4)


def test_what_is_not_a_number_is_far_from_everything() -> None:
    one, nan = {"a": torch.ones(3)}, {"a": torch.tensor([1.0, float("nan"), 1.0])}
    assert plain.distance(one, one) == 0
    assert plain.distance(nan, one) == float("inf")
    assert plain.not_finite(nan) == 1


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_merges, "PACKAGES", {"Nobody": "no_such_package"})
    found = other_merges.found()["Nobody"]
    assert found.version is None
    assert "no_such_package" in found.reason


def test_a_measurement_says_what_went_wrong(tmp_path: Path) -> None:
    def wrong() -> plain.State:
        raise ValueError("this cannot be")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads
        with pytest.raises(RuntimeError, match="ValueError: this cannot be"):
            peers.measured(wrong, tmp_path)
        found = peers.measured(lambda: {"a": torch.ones(2)}, tmp_path)
    assert torch.equal(found.state["a"], torch.ones(2))
    assert found.seconds > 0


def test_every_reason_is_explained(case: plain.Case, tmp_path: Path) -> None:
    rows = [*peer_rows.merges(case, tmp_path), *peer_rows.from_data(replace(case, name="transformer"))]
    assert {row.reason for row in rows} <= peer_rows.REASONS.keys()
    assert all(row.same is not None for row in rows if row.reason not in ("none", "files"))


def test_with_the_same_settings_fusionbench_gives_the_same(case: plain.Case, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("fusion_bench", reason="needs FusionBench, which `make peers` installs")
        rows = [
            row for row in (*peer_rows.merges(case, tmp_path), *peer_rows.from_data(case)) if row.peer == "FusionBench"
        ]
        assert len(rows) == 7
        for row in rows:
            ours, theirs = row.same() if row.same else (row.ours(), row.theirs())
            assert plain.distance(ours, theirs) < peer_rows.SAME, row.name
