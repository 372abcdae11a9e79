"""Uploads from every form of batches are the same, and what is lost is said."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from support.clients import batches, network

DATA = batches()


class Named(nn.Module):
    """Takes tokens and a mask, as a language model does, and gives back an object with logits."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda logits: logits, seed: int = 0):
        super().__init__()
        self.inner, self._wrap = network(seed), wrap

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self._wrap(self.inner(input_ids * attention_mask))


@dataclass
class Output:
    logits: Tensor


MASK = torch.ones(16, 12)
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "three": lambda x, y: (x, MASK, y),
    "nested": lambda x, y: ((x, MASK), y),
    "dict": lambda x, y: {"input_ids": x, "attention_mask": MASK, "labels": y},
    "dict and labels": lambda x, y: ({"input_ids": x, "attention_mask": MASK}, y),
    "encoding": lambda x, y: UserDict(input_ids=x, attention_mask=MASK, labels=y),
    "arrays": lambda x, y: (x.numpy(), MASK.numpy(), y.numpy()),
}


def same(found: maecho.Upload, expected: maecho.Upload) -> None:
    assert found.examples == expected.examples
    assert found.statistics["classes"].tolist() == expected.statistics["classes"].tolist()
    torch.testing.assert_close(found.statistics["targets"], expected.statistics["targets"])
    for one, other in zip(found.statistics["gram"].values(), expected.statistics["gram"].values(), strict=True):
        torch.testing.assert_close(one.dense(), other.dense())


EXPECTED = ["classes", "targets", "gram"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrap", [lambda z: z, lambda z: (z, z), Output, lambda z: {"logits": z}])
def test_a_model_of_two_inputs(form: str, wrap: Any) -> None:
    data = [FORMS[form](x, y) for x, y in DATA]
    same(
        maecho.make_upload(Named(wrap), data, "ann", EXPECTED, rank=None),
        maecho.make_upload(network(), DATA, "ann", EXPECTED, rank=None),
    )
    assert maecho.evaluate(Named(wrap), data) == maecho.evaluate(network(), DATA)
    models = [Named(wrap, seed) for seed in range(2)]
    both = maecho.evaluate(maecho.Ensemble(models), data)
    assert both == maecho.evaluate(maecho.Ensemble([network(seed) for seed in range(2)]), DATA)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_model_of_two_inputs(form: str) -> None:
    class Gained(Named):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(5))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
            return Output(super().forward(input_ids, attention_mask) * self.gain)

    fisher = [
        maecho.make_upload(model, data, "ann", ["fisher"]).statistics["fisher"]
        for model, data in ((Gained(), [FORMS[form](x, y) for x, y in DATA]), (network(), DATA))
    ]
    torch.testing.assert_close(fisher[0]["inner.0.weight"], fisher[1]["0.weight"])
    assert fisher[0]["gain"].norm() > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_relay_of_a_model_of_two_inputs(form: str) -> None:
    data = [FORMS[form](x, y) for x, y in DATA]
    found = maecho.relay(Named(Output, 9), [(Named(Output, i), data) for i in range(2)])
    expected = maecho.relay(network(9), [(network(i), DATA) for i in range(2)])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[f"inner.{name}"], tensor)


def test_functions_find_inputs_labels_and_outputs() -> None:
    class Odd(nn.Module):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            self.inner = network(seed)

        def forward(self, sample: Any) -> Any:
            return {"deep": [self.inner(sample)]}

    class Sample:
        def __init__(self, x: Tensor, y: Tensor):
            self.x, self.y = x, y

    data = [Sample(x, y) for x, y in DATA]
    rules: dict[str, Any] = {
        "inputs": lambda batch: batch.x,
        "labels": lambda batch: batch.y,
        "outputs": lambda output: output["deep"][0],
    }
    names = [*EXPECTED, "moments", "features", "fisher"]
    found = maecho.make_upload(Odd(), data, "ann", names, rank=None, **rules)
    expected = maecho.make_upload(network(), DATA, "ann", names, rank=None)
    same(found, expected)
    assert found.head == "inner.4"
    torch.testing.assert_close(found.statistics["moments"].means, expected.statistics["moments"].means)
    (one,), (other,) = found.statistics["features"].values(), expected.statistics["features"].values()
    torch.testing.assert_close(one.means, other.means)
    torch.testing.assert_close(found.statistics["fisher"]["inner.0.weight"], expected.statistics["fisher"]["0.weight"])
    assert maecho.evaluate(Odd(), data, **rules) == maecho.evaluate(network(), DATA)
    ensemble = maecho.Ensemble([Odd(0), Odd(1)], outputs=rules["outputs"])
    plain = maecho.Ensemble([network(0), network(1)])
    both = maecho.evaluate(ensemble, data, inputs=rules["inputs"], labels=rules["labels"])
    assert both == maecho.evaluate(plain, DATA)
    for options in ({}, {"rounds": 2}):
        merged = maecho.relay(Odd(9), [(Odd(i), data) for i in range(2)], **options, **rules)
        expected_merged = maecho.relay(network(9), [(network(i), DATA) for i in range(2)], **options)
        for name, tensor in expected_merged.items():
            torch.testing.assert_close(merged[f"inner.{name}"], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [lambda y: y[:, None], Tensor.tolist, Tensor.float, Tensor.numpy])
def test_labels_in_other_forms(change: Any) -> None:
    data = [(x, change(y)) for x, y in DATA]
    same(
        maecho.make_upload(network(), data, "ann", EXPECTED, rank=None),
        maecho.make_upload(network(), DATA, "ann", EXPECTED, rank=None),
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda y: y + 0.5, "the labels are not whole numbers, as in regression"),
        (lambda y: y + 1, "labels must lie in 0 … 4, since the model has 5 outputs, got 5"),
        (lambda y: y - 1, "labels must lie in 0 … 4, since the model has 5 outputs, got -1"),
        (lambda y: torch.eye(5)[y], r"the labels are \(16, 5\), not one number for each of 16 examples"),
        (lambda y: ["a"] * len(y), "the labels are no numbers"),
    ],
)
def test_labels_that_cannot_be_used(change: Any, why: str) -> None:
    data = [(x, change(torch.where(torch.arange(16) < 5, torch.arange(16), y))) for x, y in DATA]
    with pytest.warns(UserWarning, match="^ann: ") as said:
        upload = maecho.make_upload(network(), data, "ann")
    assert upload.has == {"gram", "projector", "moments", "features"}
    assert upload.statistics["moments"].classes.tolist() == [-1]
    sentences = [str(one.message) for one in said]
    assert len(sentences) == 2
    for sentence, what in zip(
        sentences, ("no labels are used for some batches", "not sent: classes, since"), strict=True
    ):
        assert what in sentence
        assert why.replace("\\", "") in sentence
        assert "labels=" in sentence
    with pytest.warns(UserWarning, match=f"^client 0: no labels are used for some batches or all, since {why}"):
        relayed = maecho.relay(network(9), [(network(), data)])
    bare = maecho.relay(network(9), [(network(), [x for x, _ in DATA])])
    for name, tensor in bare.items():
        torch.testing.assert_close(relayed[name], tensor)


def test_a_model_of_one_output_has_no_classes() -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.warns(UserWarning, match="labels must lie in 0 … 0, since the model has 1 outputs"):
        upload = maecho.make_upload(model, [(x, y.float() * 100) for x, y in DATA], "ann")
    assert "moments" in upload.has


def test_a_reason_is_never_false() -> None:
    """With labels, it is the outputs that are missing."""
    model = nn.Sequential(network(), nn.Unflatten(1, (5, 1)))
    with pytest.warns(UserWarning, match="not sent: classes, targets, since the model's output is not one row of cla"):
        maecho.make_upload(model, DATA, "ann", ["classes", "targets", "gram"])


def test_sample_weights_are_warned_of_once() -> None:
    data = [(x, y, torch.rand(16)) for x, y in DATA]
    with pytest.warns(UserWarning, match="^ann: sample weights are not used") as said:
        same(
            maecho.make_upload(network(), data, "ann", EXPECTED, rank=None),
            maecho.make_upload(network(), DATA, "ann", EXPECTED, rank=None),
        )
    assert len(said) == 1


def test_a_layer_that_is_not_called_is_warned_of() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.a(x).relu(), self.b.weight, self.b.bias)

    with pytest.warns(UserWarning, match="ann: nothing of b is in gram, since no module of that name ran on these bat"):
        maecho.make_upload(ByHand(), DATA, "ann", ["gram"])


def test_privacy_takes_the_same_batches_and_says_what_is_lost() -> None:
    privacy = maecho.Privacy(0.1, 2.0, generator=torch.Generator().manual_seed(0))
    data = [(x, y + 0.5) for x, y in DATA]
    with pytest.warns(UserWarning, match="^ann: ") as said:
        upload = maecho.make_upload(network(), data, "ann", privacy=privacy)
    assert ["not whole numbers, as in regression" in str(one.message) for one in said] == [True, True]
    assert upload.has == {"moments"}
    found = maecho.make_upload(network(), [{"input": x, "labels": y[:, None]} for x, y in DATA], "ann", privacy=privacy)
    assert found.has == {"moments", "classes"}
