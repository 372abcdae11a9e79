"""Optimal transport, PFNM and FedMA: they bring permuted copies into one order; our OT agrees with POT and SciPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

import maecho
from maecho import InputError, UploadError
from maecho.aggregation.matching import PFNM, FedMA, assign
from maecho.aggregation.ot import OT, MAEchoOT
from maecho.alignment.transport import Alignment
from maecho.lab.networks import mlp
from maecho.network.spaces import load
from support.clients import batches, network, rng
from support.networks import NETWORKS, permuted_copies


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", ["ot", "ma-echo+ot", "fedma"])
def test_permuted_copies_give_the_model_back(name: str, method: str) -> None:
    model, x, uploads = permuted_copies(name)
    made = NETWORKS[name][0]().eval()
    made.load_state_dict(maecho.aggregate(uploads, method, model=model))
    torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_statistics_move_with_the_neurons(name: str) -> None:
    """Aligned uploads of permuted copies are uploads of the reference: its weights and, on the same data, its Grams."""
    model, x, uploads = permuted_copies(name, 2)
    again = maecho.make_upload(_of(name, uploads[1]), [(x, torch.arange(12) % 5)], "client-1", rank=None)
    aligned = Alignment(model=model, reference="client-0").align([uploads[0], again])[1]
    for key, tensor in uploads[0].weights.items():
        torch.testing.assert_close(aligned.weights[key], tensor)
    for kind in ("gram", "projector"):
        for layer, spectrum in uploads[0].statistics[kind].items():
            torch.testing.assert_close(
                aligned.statistics[kind][layer].dense(),
                spectrum.dense(),
                rtol=1e-3,
                atol=1e-3 * float(spectrum.values.max()),
            )


def _of(name: str, upload: maecho.Upload) -> nn.Module:
    model = NETWORKS[name][0]().eval()
    model.load_state_dict(upload.state_dict())
    return model


def test_exact_transport_is_the_hungarian_assignment() -> None:
    cost = torch.rand(20, 20, generator=rng(), dtype=torch.float64)
    M = Alignment()._match(cost)
    own, theirs = linear_sum_assignment(cost.numpy())
    assert [int(M[b].argmax()) for b in theirs] == list(own)
    torch.testing.assert_close(M.sum(0), torch.ones(20, dtype=torch.float64))


def test_entropic_transport_is_doubly_stochastic_and_exact_in_the_limit() -> None:
    cost = torch.rand(15, 15, generator=rng(), dtype=torch.float64)
    soft = Alignment(transport="sinkhorn", regularisation=0.2)._match(cost)
    torch.testing.assert_close(soft.sum(0), torch.ones(15, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    assert 0 < float(soft.min()) < float(soft.max()) < 1
    hard = Alignment(transport="sinkhorn", regularisation=0.002)._match(cost)
    torch.testing.assert_close(hard, Alignment()._match(cost), rtol=0.05, atol=0.05)


def test_soft_statistics_are_those_of_the_mixed_inputs() -> None:
    uploads = [
        maecho.make_upload(network(i, torch.float64), batches(i, dtype=torch.float64), f"c{i}", rank=None)
        for i in range(2)
    ]
    alignment = Alignment(transport="sinkhorn", model=network(), reference="c0")
    aligned = alignment.align(uploads)[1]
    # A convex mix of neurons cannot have more energy than the neurons.
    before, after = uploads[1].statistics["gram"]["2"], aligned.statistics["gram"]["2"]
    assert float(after.values.sum()) <= float(before.values.sum())
    assert after.complaint() is None
    assert maecho.aggregate(uploads, "ot", transport="sinkhorn", model=network()).recipe["clients"] == 2


def test_the_reference_is_a_choice() -> None:
    model, _, uploads = permuted_copies("mlp")
    for name in ("client-0", "client-2"):
        aligned = Alignment(model=model, reference=name).align(uploads)
        expected = next(u for u in uploads if u.client == name)
        for upload in aligned:
            torch.testing.assert_close(upload.weights["fc1.weight"], expected.weights["fc1.weight"])
    with pytest.raises(InputError, match="reference must be largest or the name of a client, got 'client-9'"):
        Alignment(model=model, reference="client-9").align(uploads)


def test_the_spaces_are_those_of_the_largest_client() -> None:
    """Here it says that no neurons may move."""
    _, _, uploads = permuted_copies("mlp")
    *others, largest = sorted(uploads, key=lambda upload: upload.examples)
    assert largest.examples > others[-1].examples
    fixed = replace(largest, spaces=())
    for order in ([*others, fixed], [fixed, *others]):
        for before, after in zip(order, Alignment().align(order), strict=True):
            assert all(torch.equal(after.weights[name], weight) for name, weight in before.weights.items())
    assert any(
        not torch.equal(after.weights[name], weight)
        for before, after in zip(uploads, Alignment().align(uploads), strict=True)
        for name, weight in before.weights.items()
    )


def test_assign_finds_shared_and_separate_neurons() -> None:
    """Two clients share three neurons and have two more each, so there are seven global neurons."""
    draw = np.random.default_rng(0)
    truth = 5 * draw.normal(size=(7, 30))
    sets = [[0, 1, 2, 3, 4], [6, 2, 5, 0, 1]]
    neurons = [truth[s] + 0.1 * draw.normal(size=(5, 30)) for s in sets]
    found = assign(neurons, sigma0=5.0, sigma=0.5, gamma=7.0, most=10)
    same = {(i, j) for i in range(5) for j in range(5) if found[0][i] == found[1][j]}
    assert same == {(i, j) for i in range(5) for j in range(5) if sets[0][i] == sets[1][j]}
    assert len(set(found[0]) | set(found[1])) == 7
    capped = assign(neurons, 5.0, 0.5, 7.0, most=5)
    assert len(set(capped[0]) | set(capped[1])) == 5


def test_pfnm_grows_and_the_model_can_be_built() -> None:
    models = [mlp((12, 9, 7, 5), bias=True) for _ in range(3)]
    uploads = [maecho.make_upload(m, batches(i), f"c{i}") for i, m in enumerate(models)]
    merged = maecho.aggregate(uploads, "pfnm", model=models[0], sigma=0.3)
    assert 9 < merged.widths["fc1"] <= 18
    assert merged["fc2.weight"].shape == (merged.widths["fc2"], merged.widths["fc1"])
    built = load(mlp((12, 9, 7, 5), bias=True), merged)
    assert built(torch.zeros(2, 12)).shape == (2, 5)


def test_entries_are_averaged_over_those_who_have_them() -> None:
    """Two clients have no neuron in common: the merged network holds both side by side, and its head both heads."""
    one, two = mlp((4, 2, 3)), mlp((4, 2, 3))
    with torch.no_grad():
        one.get_parameter("fc1.weight").copy_(torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0]]))
        two.get_parameter("fc1.weight").copy_(torch.tensor([[0, 0, 9.0, 0], [0, 0, 0, 9]]))
    x = torch.randn(8, 4, generator=rng())
    uploads = [maecho.make_upload(m, [x], f"c{i}") for i, m in enumerate((one, two))]
    merged = maecho.aggregate(uploads, "pfnm", model=one, sigma=0.1, sigma0=1.0)
    assert merged.widths == {"fc1": 4}
    torch.testing.assert_close(load(mlp((4, 2, 3)), merged)(x), one(x) + two(x))


@pytest.mark.parametrize("method", ["ot", "ma-echo+ot", "pfnm", "fedma"])
def test_without_spaces_one_sentence_says_what_to_do(method: str) -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x if x.sum() > 0 else -x)

    upload = maecho.make_upload(Untraceable(), batches(), "ann")
    with pytest.raises(
        UploadError, match=r"ann: matching needs the neuron spaces .*got none; give .*as model=.*as spaces="
    ):
        maecho.aggregate([upload], method)


def test_bad_options() -> None:
    for options, words in (
        ({"transport": "rail"}, "transport must be one of emd, sinkhorn, got 'rail'"),
        ({"regularisation": 0.0}, "regularisation must be positive"),
    ):
        with pytest.raises(ValueError, match=words):
            OT(**options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=words):
            MAEchoOT(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"growth must be at least 1 and finite, got 0\.5"):
        FedMA(growth=0.5)
    conv = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(20, 5))
    upload = maecho.make_upload(conv, [(x.unsqueeze(1), y) for x, y in batches()], "ann")
    with pytest.raises(InputError, match="pfnm is for fully connected networks, got the layer '0'; use fedma"):
        PFNM(model=conv)([upload])
