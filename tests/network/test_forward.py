"""Passes over batches: what the model gets, and that nobody sees what a model writes into its inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maecho
from maecho.network.forward import forward
from maecho.network.stages import plan
from support.clients import Net, batches, network
from support.tiny import refused_input


class Shifting(nn.Module):
    """Scales its inputs in place, as a first line of forward may do."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.inner = network(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sub_(3).div_(2))


class Shifted(Shifting):
    """The same function, without a change of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x - 3) / 2)


def copies() -> list[Any]:
    return [(x.clone() + 3, y) for x, y in batches()]


def equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5)


def test_a_pass_holds_the_inputs_as_they_were() -> None:
    data = copies()
    for step, (x, _), (before, _) in zip(forward(Shifting(), data, "ann"), data, copies(), strict=True):
        assert torch.equal(step.inputs, before)
        assert torch.equal(x, before)
        torch.testing.assert_close(step.output, Shifted()(before))


def test_statistics_see_what_the_model_saw() -> None:
    names = ["gram", "projector", "classes", "moments", "features", "targets", "fisher", "gradients"]
    found = maecho.make_upload(Shifting(), copies(), "ann", names, rank=None)
    expected = maecho.make_upload(Shifted(), copies(), "ann", names, rank=None)
    equal(
        {k: v for name in names for k, v in maecho.statistics.STATISTICS[name].tensors(found.statistics[name]).items()},
        {k: v for n in names for k, v in maecho.statistics.STATISTICS[n].tensors(expected.statistics[n]).items()},
    )
    assert float(found.statistics["moments"].means.mean()) == pytest.approx(3, abs=0.3)


def test_what_a_layer_got_may_be_overwritten_later() -> None:
    def overwriting(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).relu()
        z = net.b(h)
        h.fill_(7)
        return z

    def kept(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x).relu())

    parts = {"a": nn.Linear(12, 6), "b": nn.Linear(6, 5, bias=False)}
    names = ["gram", "features", "targets"]
    found, expected = (
        maecho.make_upload(Net(forward, **parts).double(), batches(dtype=torch.float64), "ann", names, rank=None)
        for forward in (overwriting, kept)
    )
    torch.testing.assert_close(found.statistics["targets"], expected.statistics["targets"])
    torch.testing.assert_close(found.statistics["features"]["b"].means, expected.statistics["features"]["b"].means)


def test_both_networks_of_a_relay_and_all_members_of_an_ensemble_get_the_same_inputs() -> None:
    kinds: list[Any] = [Shifting, Shifted]
    one, other = (maecho.relay(kind(9), [(kind(i), copies()) for i in range(2)]) for kind in kinds)
    equal(one, other)
    one, other = (maecho.Ensemble([kind(i) for i in range(3)])(copies()[0][0]) for kind in kinds)
    torch.testing.assert_close(one, other)
    data = copies()
    assert maecho.evaluate(Shifting(), data) == maecho.evaluate(Shifting(), data) == maecho.evaluate(Shifted(), data)


def test_planning_leaves_the_inputs_alone() -> None:
    x = copies()[0][0]
    before = x.clone()
    assert len(plan(Shifting(), x).stages) == 3
    assert torch.equal(x, before)


def test_methods_that_run_models_on_drawn_inputs_give_each_its_own() -> None:
    uploads = [
        [maecho.make_upload(kind(i), copies(), f"{i}", rank=None) for i in range(2)] for kind in (Shifting, Shifted)
    ]
    models: list[Any] = [Shifting(), Shifted()]
    small = {"epochs": 1, "generator_steps": 2, "student_steps": 2, "batch_size": 8, "width": 2}
    for method, options in (("echo-chain", {}), ("dense", small), ("ot", {"metric": "activations"})):
        one, other = (
            maecho.aggregate(given, method, model=model, **options)
            for given, model in zip(uploads, models, strict=True)
        )
        equal(one, other)


def test_a_batch_that_is_one_example_is_refused() -> None:
    x, y = batches()[0]
    data = TensorDataset(x, y)
    for given in (data, DataLoader(data, batch_size=None)):
        for run in (
            lambda given=given: maecho.make_upload(network(), given, "ann"),
            lambda given=given: maecho.evaluate(network(), given),
            lambda given=given: maecho.RelayClient(network(), given, "ann").answer({"open": torch.ones(1)}),
        ):
            with refused_input("a batch must hold several examples and a label for each", "use a DataLoader"):
                run()
    for given in (TensorDataset(x), DataLoader(TensorDataset(x), batch_size=None)):
        with refused_input("ann: ", "outputs for each of 12 examples, got 5 numbers", "use a DataLoader"):
            maecho.make_upload(network(), given, "ann")


def test_arguments_that_the_model_does_not_take_end_in_a_sentence() -> None:
    x, y = batches()[0]
    with refused_input("ann: statistics: the model must take inputs (16, 12), (16,), got an error"):
        maecho.make_upload(network(), [((x, y), y)], "ann", inputs=lambda batch: batch[0])
