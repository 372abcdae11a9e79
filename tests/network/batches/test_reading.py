"""The forms of batches: where inputs and labels are, and what is lost is said."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maecho.errors import InputError
from maecho.network.batches.inputs import examples, subset
from maecho.network.batches.labels import NO_LABELS, classes_of
from maecho.network.batches.reading import Reader, Reading, scores
from support.clients import Net
from support.tiny import refused_input

x, y = torch.randn(6, 4), torch.arange(6) % 3
ids, mask = torch.arange(24).reshape(6, 4), torch.ones(6, 4, dtype=torch.long)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Two(One):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.fc((ids * mask).float())


class Optional(One):
    def forward(self, ids: Any = None, mask: Any = None, kind: Any = None) -> Tensor:  # type: ignore[override]
        return self.fc((ids * mask).float())


def read(model: nn.Module, batch: Any, reading: Reading | None = None) -> tuple[Any, Any]:
    return Reader(model, "ann", reading).read(batch)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("model", [Two(), Optional(), nn.DataParallel(Two())])
@pytest.mark.parametrize("batch", [(ids, mask, y), [ids, mask, y], ((ids, mask), y), ([ids, mask], y)])
def test_several_inputs(model: nn.Module, batch: Any) -> None:
    inputs, labels = read(model, batch)
    assert isinstance(inputs, tuple)
    same(inputs, (ids, mask))
    assert labels is y


def test_several_inputs_without_labels() -> None:
    for batch in ((ids, mask), ((ids, mask),), ((ids, mask), None)):
        inputs, labels = read(Two(), batch)
        same(inputs, (ids, mask))
        assert labels is None


def test_a_model_of_one_argument_gets_a_tuple_as_it_is() -> None:
    inputs, labels = read(One(), ((ids, mask), y))
    same(inputs, ((ids, mask),))
    assert labels is y


@pytest.mark.parametrize(
    ("batch", "labels"), [((x, y), y), ([x, y], y), ((x,), None), (x, None), ((x, None), None), ((x, y.tolist()), y)]
)
def test_one_input(batch: Any, labels: Any) -> None:
    inputs, found = read(One(), batch)
    same(inputs, x)
    assert found is None if labels is None else classes_of(found, 6)[0].tolist() == labels.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("model", [One(), Optional(), Two()])
def test_sample_weights_are_warned_of(model: nn.Module) -> None:
    batch = (ids, mask, y, torch.rand(6)) if isinstance(model, Two) else (x, y, torch.rand(6))
    reader = Reader(model, "ann")
    with pytest.warns(
        UserWarning, match=r"^ann: sample weights are not used: all examples count alike.*inputs="
    ) as said:
        inputs, labels = [reader.read(batch) for _ in range(3)][-1]
    assert len(said) == 1
    assert labels is y
    same(inputs, (ids, mask) if isinstance(model, Two) else x)


def test_other_parts_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"^ann: 1 further part\(s\) of a batch are not used"):
        assert read(One(), (x, y, torch.arange(6)))[1] is y


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mappings(kind: Any) -> None:
    inputs, labels = read(Optional(), kind({"ids": ids, "mask": mask, "labels": y}))
    assert type(inputs) is dict
    assert inputs.keys() == {"ids", "mask"}
    assert labels is y
    assert read(Optional(), kind({"ids": ids, "mask": mask}))[1] is None
    nested = read(Optional(), (kind({"ids": ids, "mask": mask}), y))
    assert nested[0].keys() == {"ids", "mask"}
    assert nested[1] is y


def test_names_that_the_model_does_not_take() -> None:
    same(read(One(), {"image": x, "label": y})[0], x)
    with pytest.warns(UserWarning, match="ann: 'place' of the batches are not used, since the model takes no such arg"):
        same(read(One(), {"x": x, "place": y})[0], x)
    with refused_input("ann: the model must take the inputs of a batch by their names, got 'image', 'place'"):
        read(One(), {"image": x, "place": y})


def test_arrays_and_lists_get_the_dtype_of_the_model() -> None:
    for inputs in (x.double().numpy(), x.tolist(), x.double().numpy()[::-1][::-1]):
        found, labels = read(One(), (inputs, y.numpy()))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, x)
        assert classes_of(labels, 6)[0].tolist() == y.tolist()  # type: ignore[union-attr]
    frozen = ids.numpy().copy()
    frozen.flags.writeable = False
    same(read(One(), frozen)[0], ids)
    assert read(One(), {"x": x.tolist()})[0].shape == (6, 4)
    with refused_input("ann: inputs must be tensors, arrays or lists of numbers, got str; say with inputs="):
        read(One(), (["a", "b"], y))
    with refused_input("ann: inputs must be numbers, as many for each example"):
        read(One(), ([[1, 2], [3]], y))


@pytest.mark.parametrize("label", [1, 1.0, torch.tensor(1), np.int64(1), np.array(1)])
def test_a_single_example_is_refused(label: Any) -> None:
    said = "ann: a batch must hold several examples and a label for each, got a single example with the label 1"
    for batch in ((x[0], label), {"x": x[0], "labels": label}):
        with refused_input(said, "use a DataLoader with a batch_size"):
            read(One(), batch)


def test_a_list_of_examples_is_refused() -> None:
    with refused_input("ann: inputs must be tensors, arrays or lists", "got int"):
        read(One(), [(x[0], 1), (x[1], 2)])
    with refused_input("a batch must hold several examples", "got a single example with the label 2", "DataLoader"):
        read(One(), [1, 2, 3])


def test_functions_of_the_user_come_first() -> None:
    batch = {"picture": x, "others": {"truth": y}}
    reading = Reading(inputs=lambda b: b["picture"], labels=lambda b: b["others"]["truth"])
    inputs, labels = read(One(), batch, reading)
    same(inputs, x)
    assert labels is y
    assert read(One(), (x, 5, y), Reading(inputs=lambda b: b[0]))[1] is y
    assert read(One(), {"z": x, "labels": y}, Reading(inputs=lambda b: b["z"]))[1] is y
    assert read(One(), (x, y), Reading(labels=lambda b: None))[1] is None
    for name, of in (("inputs", "a batch"), ("labels", "a batch"), ("outputs", "the model's output")):
        with refused_input(f"{name} must be a function of {of}, got 'x'"):
            Reading(**{name: "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "labels",
    [y, y[:, None], y.tolist(), y.float(), y.double().numpy(), tuple(y.tolist()), y.short(), y[:, None].float()],
)
def test_whole_numbers_are_classes(labels: Any) -> None:
    found, why = classes_of(labels, 6)
    assert found is not None
    assert found.dtype == torch.int64
    assert found.tolist() == y.tolist()
    assert why == ""


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (None, NO_LABELS),
        (y + 0.5, "the labels are not whole numbers, as in regression"),
        (torch.full((6,), torch.nan), "the labels are not whole numbers"),
        (y[:4], "there are 4 labels for 6 examples"),
        (torch.eye(6), "the labels are (6, 6), not one number for each of 6 examples"),
        (["a"] * 6, "the labels are no numbers"),
        (y + 0j, "the labels are complex numbers"),
        ({"boxes": y}, "the labels are of type dict"),
    ],
)
def test_why_there_are_no_classes(labels: Any, why: str) -> None:
    found, said = classes_of(labels, 6)
    assert found is None
    assert said.startswith(why)


def test_examples_of_inputs() -> None:
    assert examples((ids, mask)) == examples({"n": 3, "ids": ids}) == examples(((ids, mask),)) == 6
    places = torch.ones(4, 4)
    found = subset({"ids": ids, "places": places, "n": 3}, slice(1, 3), 6)
    same(found["ids"], ids[1:3])
    assert found["places"] is places
    assert found["n"] == 3
    same(subset((ids, mask), torch.tensor([2]), 6)[0], ids[2:3])
    for nothing in ({"n": 3}, torch.tensor(1.0)):
        with pytest.raises(InputError, match="inputs must hold a tensor with one row for each example"):
            examples(nothing)


def test_scores_of_outputs() -> None:
    class Made:
        logits = x

    for output in (x, (x, y), [x], Made(), {"loss": y, "logits": x}):
        assert scores(output) is x
    assert scores({"deep": {"x": x}}, lambda output: output["deep"]["x"]) is x
    assert scores(()) == ()


def test_a_forward_that_python_cannot_look_into_takes_one_tensor() -> None:
    model = Net(lambda net, x: x)
    model.forward = 3  # type: ignore[assignment]
    assert read(model, (x, y))[1] is y
