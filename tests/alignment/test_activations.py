"""Neurons matched by their outputs on common inputs: permuted copies get one order, and costs are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import maecho
from maecho import InputError, UploadError
from maecho.aggregation.ot import OT, MAEchoOT
from maecho.alignment.responses import Responses, common_inputs
from maecho.alignment.transport import Alignment
from maecho.network.spaces import Place, Space, permute
from maecho.network.tracing import derive
from support.clients import batches, clients, network, rng
from support.contract import close
from support.networks import NETWORKS, permuted_copies
from support.tiny import with_statistics

METHODS = ["ot", "ma-echo+ot"]
BOTH: dict[str, Any] = {"metric": "activations", "probes": 200}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_permuted_copies_give_the_model_back(name: str, method: str) -> None:
    model, x, uploads = permuted_copies(name)
    made = NETWORKS[name][0]().eval()
    made.load_state_dict(maecho.aggregate(uploads, method, model=model, **BOTH))
    torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-5)


def shallow(seed: int, width: int = 9) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, width), nn.ReLU(inplace=True), nn.Linear(width, 5, bias=False)).double()


def uploads_of(*models: nn.Module) -> list[maecho.Upload]:
    return [
        maecho.make_upload(model, batches(i, 3 + i, dtype=torch.float64), f"client-{i}")
        for i, model in enumerate(models)
    ]


def drawn(uploads: list[maecho.Upload], probes: int, seed: int = 0) -> Tensor:
    return torch.cat([x for _, inputs in common_inputs(uploads, probes, seed, torch.float64) for x, _ in inputs])


def test_the_assignment_is_the_hungarian_one_of_the_cost_by_hand() -> None:
    """The outputs are those before the activation, even if the activation works in place."""
    uploads = uploads_of(shallow(0), shallow(1))
    x = drawn(uploads, 300)
    own, theirs = (x @ u.weights["0.weight"].T + u.weights["0.bias"] for u in uploads)
    cost = (own.T.unsqueeze(1) - theirs.T.unsqueeze(0)).norm(dim=2)
    found = Responses(shallow(2), uploads[1], uploads, derive(shallow(0), x), 300, 0).distances(uploads[0])[0]
    torch.testing.assert_close(found, cost)
    again = Responses(shallow(2), uploads[1], uploads, derive(shallow(0), x), 300, 0)
    torch.testing.assert_close(again.distances(uploads[0]), again.distances(uploads[0]), rtol=0, atol=0)
    assert not any(module._forward_hooks for module in again._pair.modules())

    chosen, of = linear_sum_assignment(cost.numpy())
    order = torch.from_numpy(chosen)[torch.from_numpy(of).argsort()]
    alignment = Alignment(metric="activations", probes=300, model=shallow(2), reference="client-1")
    aligned = alignment.align(uploads)[0]
    torch.testing.assert_close(aligned.weights["0.weight"], uploads[0].weights["0.weight"][order], rtol=0, atol=0)
    torch.testing.assert_close(aligned.weights["2.weight"], uploads[0].weights["2.weight"][:, order], rtol=0, atol=0)


def test_convolutions_are_compared_over_inputs_and_places() -> None:
    """Groups and blocks too: the outputs of a depthwise convolution are its space's neurons as much as what comes
    before it."""
    model, x, uploads = permuted_copies("cnn", 2)
    spaces = derive(model, x)
    x = torch.cat([x for _, inputs in common_inputs(uploads, 50, 0) for x, _ in inputs])
    found = Responses(model, uploads[0], uploads, spaces, 50, 0).distances(uploads[1])
    expected: list[Tensor] = []
    for upload in uploads:
        one = NETWORKS["cnn"][0]().eval()
        one.load_state_dict(upload.state_dict())
        with torch.no_grad():
            both = [one[:1](x), one[:5](x)]
        expected.append(torch.cat([z.transpose(0, 1).flatten(1) for z in both], 1).double())
    cost = (expected[1].unsqueeze(1) - expected[0].unsqueeze(0)).norm(dim=2)
    torch.testing.assert_close(found[0], cost, rtol=1e-4, atol=1e-3)
    assert [len(d) for d in found] == [space.size for space in spaces]


def test_common_inputs_are_shared_out_by_examples() -> None:
    uploads = clients(3)  # of 48, 64 and 80 examples, with five classes each
    counts = {client: sum(inputs.counts()) for client, inputs in common_inputs(uploads, 1200, 0)}
    assert counts == pytest.approx({"client-0": 300, "client-1": 400, "client-2": 500}, abs=3)
    assert all(sum(inputs.counts()) == 5 for _, inputs in common_inputs(uploads, 1, 0))
    assert torch.equal(drawn(uploads, 50), drawn(uploads[::-1], 50))
    assert not torch.equal(drawn(uploads, 50), drawn(uploads, 50, seed=1))


@pytest.mark.parametrize("method", METHODS)
def test_order_of_clients_does_not_matter(method: str) -> None:
    uploads, options = clients(3, torch.float64), {**BOTH, "model": network()}
    close(maecho.aggregate(uploads, method, **options), maecho.aggregate(uploads[::-1], method, **options))


def test_a_soft_map_moves_weights_and_statistics() -> None:
    uploads = clients(2, torch.float64)
    aligned = Alignment(transport="sinkhorn", model=network(), reference="client-0", **BOTH).align(uploads)[1]
    assert float(aligned.statistics["gram"]["2"].values.sum()) <= float(uploads[1].statistics["gram"]["2"].values.sum())
    assert aligned.statistics["gram"]["2"].complaint() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_dtype_is_kept_and_nothing_given_is_changed(method: str, dtype: torch.dtype) -> None:
    uploads, model = clients(2, dtype), network(7).train()
    before = [{k: t.clone() for k, t in upload.tensors().items()} for upload in uploads]
    merged = maecho.aggregate(uploads, method, model=model, **BOTH)
    assert {t.dtype for t in merged.values()} == {dtype}
    assert all(t.isfinite().all() for t in merged.values())
    for upload, old in zip(uploads, before, strict=True):
        close(upload.tensors(), old, 0)
    close(model.state_dict(), network(7).state_dict(), 0)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_gives_the_same(method: str) -> None:
    uploads, options = clients(3, torch.float64), {**BOTH, "model": network()}
    here = maecho.aggregate(uploads, method, **options)
    there = maecho.aggregate(uploads, method, device="cuda", **options)
    close(there, here)
    stayed = maecho.aggregate([upload.to("cuda") for upload in uploads], method, **options)
    assert {t.device.type for t in stayed.values()} == {"cuda"}
    close({key: tensor.cpu() for key, tensor in stayed.items()}, here)


def rescaled(model: nn.Sequential, scales: Tensor) -> nn.Sequential:
    """The same function: incoming weights of ReLU neurons times `scales`, outgoing ones divided by it."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["0.weight"] *= scales.unsqueeze(1)
    state["0.bias"] *= scales
    state["2.weight"] /= scales
    model.load_state_dict(state)
    return model


def test_rescaled_neurons_are_found_but_averaged_as_they_are() -> None:
    """Scales are not divided out: neurons c times as large are matched while c is near 1, and their mean with the
    unscaled ones gives (1 + c)/2 · (1 + 1/c)/2 of the function."""
    c, model = 1.5, shallow(0)
    orders = {"0": torch.randperm(9, generator=rng())}
    other = rescaled(shallow(0), torch.full((9,), c, dtype=torch.float64))
    x = torch.randn(20, 12, generator=rng(), dtype=torch.float64)
    other.load_state_dict(permute(other.state_dict(), derive(other, x), orders))
    made = shallow(3)
    made.load_state_dict(maecho.aggregate(uploads_of(model, other), "ot", model=model, **BOTH))
    torch.testing.assert_close(made(x), (1 + c) * (1 + 1 / c) / 4 * model(x))


def test_rescaling_is_seen_in_its_own_layer_alone() -> None:
    model = network(0, torch.float64)
    scales = torch.linspace(0.5, 4, 9, dtype=torch.float64)
    uploads = uploads_of(model, rescaled(network(0, torch.float64), scales))
    spaces = derive(model, torch.zeros(2, 12, dtype=torch.float64))
    first, second = Responses(model, uploads[0], uploads, spaces, 200, 0).distances(uploads[1])
    z = drawn(uploads, 200) @ uploads[0].weights["0.weight"].T + uploads[0].weights["0.bias"]
    torch.testing.assert_close(first.diagonal(), (scales - 1).abs() * z.norm(dim=0))
    assert float(second.diagonal().max()) < 1e-5 * float(second.max())
    columns = [upload.weights["2.weight"] for upload in uploads]
    assert float((columns[0] - columns[1]).norm(dim=1).min()) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_what_is_missing_is_named(method: str) -> None:
    uploads = clients(2)
    pattern = method.replace("+", r"\+")
    with pytest.raises(
        InputError,
        match=rf"{pattern}: model must be the network that the uploads are weights of, since {pattern} with metric="
        rf"'activations' runs it, got none; give it as aggregate\(uploads, '{pattern}', model=network\)",
    ):
        maecho.aggregate(uploads, method, metric="activations")
    with pytest.raises(InputError, match=rf"{pattern}: model must have 9x12 for '0\.weight' .*got 9x11"):
        maecho.aggregate(uploads, method, metric="activations", model=_narrow())
    poor = [with_statistics(upload, moments=None) for upload in uploads]
    with pytest.raises(UploadError, match=rf"client-0: {pattern} needs the statistic 'moments', got"):
        maecho.aggregate(poor, method, model=network(), metric="activations")
    with pytest.raises(UploadError, match="client-0: ot needs the statistic 'moments', got"):
        Alignment(metric="activations", model=network()).align(poor)
    maecho.aggregate(poor, method)


def _narrow() -> nn.Sequential:
    model = network()
    model[0] = nn.Linear(11, 9)
    return model


def test_needs() -> None:
    for method in (OT, MAEchoOT):
        assert method(metric="activations").needs == method().needs | {"moments"}
    assert "moments" not in OT().needs | MAEchoOT().needs


@pytest.mark.parametrize("method", [OT, MAEchoOT])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "smell"}, "metric must be one of weights, activations, got 'smell'"),
        ({"probes": 0}, "probes must be a whole number, at least 1, got 0"),
        ({"probes": 2.5}, r"probes must be a whole number, at least 1, got 2\.5"),
        ({"seed": -1}, "seed must be a whole number, at least 0, got -1"),
    ],
)
def test_bad_options(method: type[OT | MAEchoOT], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        method(**options)


class ByHand(nn.Module):
    """A network that multiplies by a weight without calling its layer, or calls it as often as a buffer says."""

    def __init__(self, times: float = 0.0):
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 5)
        self.register_buffer("times", torch.tensor(times))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.one.weight, self.one.bias) if self.times == 0 else x
        for _ in range(int(self.times)):
            h = self.one(h)
        return self.two(h.relu())


@pytest.mark.filterwarnings("ignore:.*did not run in the pass")
def test_layers_that_cannot_be_compared_are_named() -> None:
    spaces = (Space("one", 12, (Place("one.weight", 0), Place("one.bias", 0), Place("two.weight", 1))),)
    for times, words in (
        ((0.0, 0.0), "space 'one' must hold the outputs of a layer that the network calls as a module"),
        (
            (1.0, 2.0),
            r"layer 'one' must run equally often on equal sizes in all networks, "
            r".*got outputs of \[\d+\] and \[\d+, \d+\] rows",
        ),
    ):
        uploads = [maecho.make_upload(ByHand(t), batches(), f"c{t}-{i}", ["moments"]) for i, t in enumerate(times)]
        with pytest.raises(InputError, match=words):
            Alignment(metric="activations", model=ByHand(), spaces=spaces, reference=uploads[0].client).align(uploads)


def test_activations_that_are_not_finite_are_named() -> None:
    model = network()
    uploads = [maecho.make_upload(model, batches(i), f"client-{i}") for i in range(2)]
    huge = replace(uploads[0], weights={**uploads[0].weights, "0.weight": torch.full((9, 12), 3e38)})
    with pytest.raises(UploadError, match=r"client-0: activations in the space '0' must be finite .*metric='weights'"):
        Alignment(metric="activations", model=model, reference="client-1").align([huge, uploads[1]])
