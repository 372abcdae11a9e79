"""Optimal transport, PFNM and FedMA: they bring permuted copies into one order; our OT agrees with POT and SciPy."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
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


def test_soft_grams_and_projectors_move_as_their_inputs_do() -> None:
    """x becomes M x, so G becomes M G Mᵀ and P becomes M P Mᵀ, where M is read off the weights: W becomes M W before
    the neurons, and W Mᵀ after them. M is the transport from the own neurons to those of the reference. The bias, the
    last input, stays."""
    uploads = [
        maecho.make_upload(network(i, torch.float64), batches(i, dtype=torch.float64), f"c{i}", rank=None)
        for i in range(2)
    ]
    reference, before = uploads
    alignment = Alignment(transport="sinkhorn", reference="c0")
    after = alignment.align(uploads)[1]
    left = torch.eye(12, dtype=torch.float64)  # the inputs of the network keep their order
    for layer, following in (("0", "2"), ("2", "4")):
        W = before.weights[f"{layer}.weight"] @ left.T
        M = after.weights[f"{layer}.weight"] @ torch.linalg.pinv(W)
        pairs = (
            (W, reference.weights[f"{layer}.weight"]),
            [u.weights[f"{layer}.bias"][:, None] for u in (before, reference)],
        )
        sizes = [torch.stack(pair).square().mean().sqrt() for pair in pairs]
        own, theirs = (
            torch.cat([part / size for part, size in zip(parts, sizes, strict=True)], 1)
            for parts in zip(*pairs, strict=True)
        )
        torch.testing.assert_close(M, alignment._match(torch.cdist(own, theirs)))
        assert float((M.max(1).values - 1).abs().max()) > 0.02, "the map must mix neurons"
        torch.testing.assert_close(M.sum(1), torch.ones(len(M), dtype=torch.float64), rtol=1e-4, atol=1e-4)
        both = torch.block_diag(M, torch.ones(1, 1, dtype=torch.float64))
        for kind in ("gram", "projector"):
            old, new = (u.statistics[kind][following].dense()[0] for u in (before, after))
            torch.testing.assert_close(new, both @ old @ both.T)
            assert float((new - old).norm() / old.norm()) > 0.05, "the map must change something"
        left = M


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


def gain(v: np.ndarray, others: np.ndarray, clients: int, k: int, sigma0: float, sigma: float, gamma: float) -> float:
    """What giving v to a global neuron made of `others` gains, as the module's docstring has it; without others it is
    the k-th new one."""

    def square(members: np.ndarray) -> float:
        return float(((members.sum(0) / sigma**2) ** 2).sum() / (1 / sigma0**2 + len(members) / sigma**2))

    m = len(others)
    if m == clients:
        raise ValueError("a global neuron must have room for one more client")
    popularity = 2 * np.log(m / (clients - m)) if m else 2 * np.log(gamma / clients) - 2 * np.log(k)
    return square(np.vstack([others, v[None]])) - (square(others) if m else 0.0) + popularity


def best(
    own: np.ndarray, members: Sequence[np.ndarray], clients: int, most: int, *prior: float
) -> tuple[float, tuple[int, ...]]:
    """The assignment of a client's neurons that gains most, found among all; new global neurons come last."""
    new = min(len(own), max(0, most - len(members)))
    table = [
        [gain(v, one, clients, 0, *prior) for one in members]
        + [gain(v, np.zeros((0, len(v))), clients, k + 1, *prior) for k in range(new)]
        for v in own
    ]
    choices = itertools.permutations(range(len(members) + new), len(own))
    return max((sum(row[c] for row, c in zip(table, chosen, strict=True)), chosen) for chosen in choices)


def as_sets(found: Sequence[Sequence[int]]) -> set[frozenset[tuple[int, int]]]:
    """Which neurons of which clients share a global one, however the global ones are numbered."""
    return {
        frozenset((j, v) for j, own in enumerate(found) for v, i in enumerate(own) if i == label)
        for label in {int(i) for own in found for i in own}
    }


def by_brute_force(
    neurons: Sequence[np.ndarray], sigma0: float, sigma: float, gamma: float, most: int, sweeps: int = 10
) -> list[list[int]]:
    """Clients take turns, each with the best of all assignments, until nothing changes."""
    found: list[list[int]] = []
    for sweep in range(sweeps):
        before = as_sets(found)
        for j, own in enumerate(neurons):
            rest = {i: f for i, f in enumerate(found) if i != j}
            labels = sorted({label for f in rest.values() for label in f})
            members = [np.array([neurons[i][f.index(x)] for i, f in rest.items() if x in f]) for x in labels]
            _, chosen = best(own, members, len(neurons), most, sigma0, sigma, gamma)
            fresh = iter(range(max(labels, default=-1) + 1, 1000))
            found[j : j + 1] = [[labels[c] if c < len(labels) else next(fresh) for c in chosen]]
        if sweep and as_sets(found) == before:
            break
    return found


PRIORS = {
    "few neurons": (1.0, 1.0, 0.5),
    "as by default": (1.0, 1.0, 7.0),
    "many neurons": (1.0, 0.5, 50.0),
    "wide": (3.0, 1.0, 7.0),
}


@pytest.mark.parametrize("most", [3, 6])
@pytest.mark.parametrize("prior", PRIORS)
def test_assign_takes_the_best_of_all_assignments(prior: str, most: int) -> None:
    """Three clients of two or three neurons each, which come from three: every turn by brute force over all that can
    be chosen, with the gains of the module's docstring, ends in the same."""
    for seed in range(12):
        draw = np.random.default_rng(seed)
        truth = draw.normal(size=(3, 2))
        sizes = [3 - (seed + j) % 2 for j in range(3)]
        neurons = [truth[draw.permutation(3)][:size] + 0.5 * draw.normal(size=(size, 2)) for size in sizes]
        found = assign(neurons, *PRIORS[prior], most=most)
        assert as_sets(found) == as_sets(by_brute_force(neurons, *PRIORS[prior], most)), seed


def test_a_second_turn_corrects_the_first() -> None:
    """The first clients choose before they know the others' neurons. A later turn knows them."""
    changed = 0
    for seed in range(30):
        neurons = list(np.random.default_rng(seed).normal(size=(4, 2, 2)))
        once, ended = (as_sets(by_brute_force(neurons, 1.0, 1.0, 1.0, 8, sweeps)) for sweeps in (1, 10))
        changed += once != ended
        assert as_sets(assign(neurons, 1.0, 1.0, 1.0, 8)) == ended, seed
    assert changed >= 5


def single(*values: float) -> list[np.ndarray]:
    return [np.array([[value]]) for value in values]


def test_gamma_decides_when_a_neuron_is_new() -> None:
    """Two clients, σ = σ0 = 1: with the other's neuron 2, the neuron 1 gains (2 + 1)²/3 − 2²/2 = 1 and loses nothing
    by popularity, 2 log(1/1) = 0; as a new one it gains 1²/2 + 2 log(γ/2). They meet at γ = 2 e^(1/4)."""
    border = 2 * np.exp(0.25)
    for gamma, widths in ((border * 0.99, 1), (border * 1.01, 2)):
        assert len(as_sets(assign(single(2.0, 1.0), 1.0, 1.0, gamma, most=2))) == widths


def test_popularity_decides_too() -> None:
    """As above with a third client, whose neuron is far from both. Only one of the two other clients has the common
    neuron, which costs 2 log(1/2): they meet at 1 − 2 log 2 = 1/2 + 2 log(γ/3), so γ = 3/2 e^(1/4)."""
    border = 1.5 * np.exp(0.25)
    for gamma, widths in ((border * 0.99, 2), (border * 1.01, 3)):
        assert len(as_sets(assign(single(2.0, 1.0, -6.0), 1.0, 1.0, gamma, most=3))) == widths


@pytest.mark.parametrize("name", ["pfnm", "fedma"])
def test_neurons_are_measured_by_their_spread(name: str) -> None:
    """The same neurons in other units are assigned in the same way: the priors are in units of their spread."""
    models = [mlp((6, 4, 3)) for _ in range(3)]
    for i, model in enumerate(models):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=rng(i)))
    found = {}
    for unit in (1e-3, 1.0, 1e3):
        uploads = []
        for i, model in enumerate(models):
            scaled = copy.deepcopy(model)
            with torch.no_grad():
                for p in scaled.parameters():
                    p.mul_(unit)
            uploads.append(maecho.make_upload(scaled, [torch.ones(2, 6)], f"c{i}"))
        found[unit] = maecho.aggregate(uploads, name, model=models[0], growth=3.0, gamma=2.0)
    assert 4 < found[1.0].widths["fc1"] < 12
    for unit in (1e-3, 1e3):
        assert found[unit].widths == found[1.0].widths
        for key, tensor in found[1.0].items():
            torch.testing.assert_close(found[unit][key], unit * tensor)


@pytest.mark.parametrize("name", ["pfnm", "fedma"])
def test_the_options_of_matching_reach_it(name: str) -> None:
    models = [network(i) for i in range(3)]
    uploads = [maecho.make_upload(model, batches(), f"c{i}") for i, model in enumerate(models)]
    widths = {
        label: maecho.aggregate(uploads, name, growth=3.0, **options).widths["0"]
        for label, options in {
            "as by default": {},
            "large sigma0": {"sigma0": 10.0},
            "large gamma": {"gamma": 1e6},
            "small gamma": {"gamma": 1e-6},
            "small sigma": {"sigma": 0.1},
        }.items()
    }
    assert 9 < widths.pop("as by default") < 27
    assert widths.pop("small gamma") == 9
    assert widths == {"large sigma0": 27, "large gamma": 27, "small sigma": 27}


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
    merged = maecho.aggregate(uploads, "pfnm", model=one, sigma=0.1, sigma0=1.0, estimate="mean")
    assert merged.widths == {"fc1": 4}
    torch.testing.assert_close(load(mlp((4, 2, 3)), merged)(x), one(x) + two(x))
    probable = maecho.aggregate(uploads, "pfnm", model=one, sigma=0.1, sigma0=1.0)
    for key, tensor in merged.items():  # every neuron is of one client
        torch.testing.assert_close(probable[key], tensor if key == "fc2.bias" else tensor / (1 + 0.1**2))


@pytest.mark.parametrize("growth", [1.0, 2.0])
def test_the_weights_of_a_global_neuron_are_the_most_probable_ones(growth: float) -> None:
    """The gradient of −log p(θ) − Σ log p(v | θ) is 0 at the weights, for the neurons as they are assigned."""
    models = [mlp((12, 9, 7, 5), bias=True) for _ in range(3)]
    uploads = [maecho.make_upload(m, batches(i), f"c{i}") for i, m in enumerate(models)]
    options = {"sigma": 0.3, "sigma0": 0.7, "growth": growth, "gamma": 1e-9}
    if growth == 1.0:  # every neuron has its match: all counts are 3
        merged = maecho.aggregate(uploads, PFNM(**options))
        means = maecho.aggregate(uploads, PFNM(**options, estimate="mean"))
        for key, theta in merged.items():
            if key == "fc3.bias":
                torch.testing.assert_close(theta, means[key])
                continue
            theta = theta.double().requires_grad_()
            # Σ ‖v − θ‖² has the gradient of 3 ‖mean − θ‖².
            loss = theta.square().sum() / (2 * 0.7**2) + 3 * (means[key].double() - theta).square().sum() / (2 * 0.3**2)
            (gradient,) = torch.autograd.grad(loss, theta)
            torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-4, rtol=0)
    else:
        assert PFNM().estimate == "map"
        assert FedMA().estimate == "mean"
        with pytest.raises(InputError, match="estimate must be one of mean, map, got 'median'"):
            PFNM(estimate="median")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["pfnm", "fedma"])
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_clients_of_one_model_do_not_grow(method: str, clients: int) -> None:
    """Also with neurons that are 0, equal to each other, or much smaller than the rest."""
    model = mlp((12, 9, 7, 5), bias=True)
    with torch.no_grad():
        model.get_parameter("fc1.weight")[0] = 0
        model.get_parameter("fc1.bias")[0] = 0
        model.get_parameter("fc1.weight")[1] *= 1e-4
        model.get_parameter("fc1.bias")[1] *= 1e-4
        model.get_parameter("fc1.weight")[2] = model.get_parameter("fc1.weight")[3]
        model.get_parameter("fc1.bias")[2] = model.get_parameter("fc1.bias")[3]
    uploads = [maecho.make_upload(model, batches(i), f"c{i}") for i in range(clients)]
    merged = maecho.aggregate(uploads, method, growth=2.0, gamma=50.0, estimate="mean")
    assert merged.widths == {"fc1": 9, "fc2": 7}
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(merged[key], tensor)


def test_a_single_client_is_not_pulled_to_zero() -> None:
    model = mlp((12, 9, 7, 5), bias=True)
    merged = maecho.aggregate([maecho.make_upload(model, batches(), "a")], "pfnm")
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(merged[key], tensor)


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
