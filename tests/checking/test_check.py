"""`maecho.check` says everything at once, in the words of `make_upload`, and leaves all as it was."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maecho
from maecho.checking import found as records
from maecho.checking import layers
from maecho.checking.found import Finding
from maecho.network.layers import Layer
from support.clients import Net, batches, network, rng
from support.relays import images, resnet, sequences, tied, transformer, twins
from support.tiny import NAN, cases, refused_input

Data = list[tuple[Tensor, Any]]


def said(check: maecho.Check, level: records.Level) -> str:
    return "\n".join(check.of(level))


def relayed(model: nn.Module, data: Any) -> set[str]:
    """What a relay client warns of when it finds its stages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert maecho.RelayClient(model, data, "ann").plan.stages
    return {str(one.message).removeprefix("ann: ") for one in caught}


def uploaded(model: nn.Module, data: Any, **options: Any) -> tuple[maecho.Upload, list[str]]:
    """An upload, and what was warned of, without the client's name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        upload = maecho.make_upload(model, data, "ann", **options)
    return upload, [str(one.message).removeprefix("ann: ").removeprefix("statistics: ") for one in caught]


def renamed(data: Data) -> list[dict[str, Any]]:
    return [{"x": x, "idx": torch.arange(len(x)), "labels": y} for x, y in data]


class Standardised(nn.Linear):
    """Not the matrix for which it is read."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


def with_idle() -> nn.Module:
    return Net(lambda net, x: net.head(x), head=nn.Linear(12, 5), idle=nn.Linear(12, 7))


def tokens_then_flat() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(2), nn.Linear(3, 4), nn.Flatten())


class Words(nn.Module):
    """Takes one argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


LOST: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "nothing": (network, batches()),
    "real labels": (network, [(x, torch.rand(len(x))) for x, _ in batches()]),
    "labels of no class": (network, [(x, y + 9) for x, y in batches()]),
    "a key that is not used": (Words, renamed(batches())),
    "sample weights": (network, [(x, y, torch.rand(len(x))) for x, y in batches()]),
    "a class that is no matrix": (lambda: nn.Sequential(Standardised(12, 5), nn.Linear(5, 5)), batches()),
    "a recurrent layer": (
        lambda: Net(lambda net, x: net.head(net.rnn(x)[0]), rnn=nn.LSTM(12, 6), head=nn.Linear(6, 5)),
        batches(),
    ),
    "an idle layer": (with_idle, batches()),
    "neurons out of order": (tokens_then_flat, batches()),
    "tokens": (transformer, sequences()),
}


@pytest.mark.parametrize(("make", "data"), **cases(LOST))
def test_warnings_are_those_of_an_upload(make: Callable[[], nn.Module], data: Any) -> None:
    model = make()
    _, expected = uploaded(model, data)
    found = maecho.check(model, data)
    assert found.ok
    warned = found.of("warning")
    assert len(warned) == len(set(warned))
    assert set(expected) <= set(warned) <= set(expected) | relayed(model, data)


def test_what_a_relay_warns_of_is_not_said_twice() -> None:
    make, data = LOST["a class that is no matrix"]
    assert len(relayed(make(), data)) == 1
    assert len(maecho.check(make(), data).of("warning")) == 1


def test_everything_that_is_wrong_is_said_at_once() -> None:
    model, data = network(), batches()
    with torch.no_grad():
        model[0].weight[0, 0] = NAN
        model[4].bias[0] = NAN
    x, y = data[0][0].clone(), data[0][1].float() + 0.5
    x[2:4, 0] = NAN
    found = maecho.check(model, TensorDataset(x, y))
    errors = said(found, "error")
    assert len(found.of("error")) == 4
    for part in (
        "weight '0.weight' must be finite, got NaN or infinity; take an earlier checkpoint",
        "weight '4.bias' must be finite",
        "the batches must come from a DataLoader with a batch_size, got a data set of single examples",
        f"the inputs must be finite, got NaN or infinity in 2 of {len(x)} examples",
    ):
        assert part in errors
    assert "the labels are not whole numbers, as in regression" in said(found, "warning")
    assert not found.ok
    assert [one.read for one in found.layers] == ["verified"] * 3
    assert [finding.level for finding in found.findings] == sorted(
        (finding.level for finding in found.findings), key=records.LEVELS.index
    )
    assert "4 errors, " in str(found).splitlines()[0]


def test_many_bad_weights_are_counted() -> None:
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(NAN)
    errors = maecho.check(model, batches()).of("error")
    assert len(errors) == 4
    assert errors[-1] == "so must 3 other weights of 6"


def raising(error: Exception) -> Callable[[], nn.Module]:
    def forward(net: Any, x: Tensor) -> Tensor:
        raise error

    return lambda: Net(forward, one=nn.Linear(12, 5))


def stopping() -> Iterator[Any]:
    raise OSError("the disk is gone")
    yield


WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], tuple[str, ...]]] = {
    "narrow inputs": (
        network,
        lambda: [(x[:, :3], y) for x, y in batches()],
        ("the model must take inputs (16, 3), got an error: mat1", "say how with inputs="),
    ),
    "an assertion": (raising(AssertionError("no")), batches, ("must take its own batches, got AssertionError: no",)),
    "an index": (raising(IndexError("index out of range")), batches, ("got IndexError: index out of range",)),
    "no batches": (network, list, ("at least one example, got none",)),
    "no examples": (network, lambda: [(torch.zeros(0, 12), torch.zeros(0).long())], ("at least one example",)),
    "nothing to iterate": (network, lambda: 7, ("something to iterate over, got int",)),
    "data that fail": (network, stopping, ("the batches must be readable, got OSError: the disk is gone",)),
    "single examples": (
        network,
        lambda: DataLoader(TensorDataset(*batches()[0]), batch_size=None),
        ("must hold several examples and a label for each, got a single example", "DataLoader with a batch_size"),
    ),
    "text": (network, lambda: ["a text"], ("the single value 'a text'",)),
    "a class": (lambda: nn.Linear, batches, ("the model must be a torch.nn.Module, got type",)),
    "too small a size": (network, batches, ("the upload must fit into 10 bytes",)),
    "unknown statistic": (network, batches, ("statistics must be among", "'hessian'")),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_a_finding(case: str) -> None:
    make, data, parts = WRONG[case]
    options: dict[str, Any] = {"too small a size": {"rank": "10 B"}, "unknown statistic": {"statistics": ["hessian"]}}
    found = maecho.check(make(), data(), **options.get(case, {}))
    assert not found.ok
    for part in parts:
        assert part in said(found, "error")
    if case != "a class":
        assert found.layers, "the layers are told all the same"
    assert all("\n" not in finding.text for finding in found.findings)
    assert json.dumps(found.as_dict())


def test_a_bad_rank_is_an_error_of_the_caller() -> None:
    with refused_input("rank must be", "'3 apples'"):
        maecho.check(network(), batches(), rank="3 apples")


class Remembers(nn.Module):
    """Keeps the largest input that it has seen, draws random numbers, and writes into its input."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        self.largest.fill_(float(torch.maximum(self.largest, x.abs().max())))
        random.random()
        np.random.rand()  # noqa: NPY002
        return self.inner(x + 0 * torch.rand(1))


def states() -> tuple[Any, ...]:
    numpy = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2]


@pytest.mark.parametrize("copyable", [True, False])
def test_all_stays_as_it_was(copyable: bool) -> None:
    model = Remembers().train()
    model.inner[1].eval()
    if not copyable:
        model.inner.register_buffer("made", (model.inner[0].weight * 2)[0], persistent=False)  # no leaf of the graph
        with pytest.raises(RuntimeError):
            copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(*(torch.cat(part) for part in zip(*batches(), strict=True)))
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=generator)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs, modes = data.tensors[0].clone(), [module.training for module in model.modules()]
    before, own = states(), generator.get_state()
    found = maecho.check(model, loader)
    assert found.ok
    assert states() == before
    assert torch.equal(generator.get_state(), own)
    assert torch.equal(data.tensors[0], inputs)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert ("copy.deepcopy" in said(found, "warning")) is not copyable


def test_only_the_first_batch_is_read() -> None:
    read: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(batches()):
                read.append(number)
                yield batch

    assert maecho.check(network(), Loader()).ok
    assert read == [0]
    rest = iter(batches())
    found = maecho.check(network(), rest)
    assert "its first batch has been taken out of it" in said(found, "note")
    assert len(list(rest)) == len(batches()) - 1


def test_layers() -> None:
    by_name = {one.name: one for one in maecho.check(resnet(), images()).layers}
    stem, norm, head = by_name["stem"], by_name["bn0"], by_name["head"]
    assert (stem.kind, stem.read, stem.matrix, stem.bias, stem.inputs) == (
        "Conv2d", "verified", (1, 6, 18), False, "patches",
    )  # fmt: skip
    assert (norm.read, norm.why) == ("averaged", "a norm, which only echo fits")
    assert (head.matrix, head.bias, head.inputs, head.calls) == ((1, 5, 9), True, "numbers", 1)
    twice = {one.name: one for one in maecho.check(twins(), batches()).layers}
    assert (twice["one"].shares, twice["two"].shares, twice["again"].calls) == (("two",), ("one",), 2)
    assert "'again' runs 2 times in a pass" in said(maecho.check(twins(), batches()), "note")
    embedding = maecho.check(tied(), sequences()).layers[0]
    assert embedding.inputs == "tokens"
    idle = {one.name: one.read for one in maecho.check(with_idle(), batches()).layers}
    assert idle == {"head": "verified", "idle": "idle"}
    other = maecho.check(nn.Sequential(Standardised(12, 5), nn.PReLU()), batches()).layers
    assert [one.why for one in other] == [
        "what it gives out is not its matrix times its inputs",
        "a parameter by itself",
    ]


def test_matrices_inside_of_a_module_stand_in_its_place() -> None:
    """An upload may find matrices inside a module that is none itself, such as the gates of a recurrent layer."""
    model = nn.Sequential(nn.LSTM(12, 6))
    upload = maecho.Upload(
        "ann", 1, {"0.input.weight": torch.zeros(24, 12)}, (Layer("0.input", "0.input.weight"),), recipe={}
    )
    (one,) = layers.found(model, {"0": 1}, upload)
    assert (one.name, one.kind, one.read, one.matrix) == ("0.input", "in LSTM", "verified", (1, 24, 12))
    (whole,) = layers.found(model, {"0": 1}, maecho.Upload("ann", 1, dict(model.state_dict())))
    assert (whole.name, whole.read, whole.why) == ("0", "averaged", layers.NO_KIND)


def test_labels_stages_spaces_and_methods() -> None:
    found = maecho.check(network(), batches())
    y = batches()[0][1]
    assert found.labels is not None
    assert found.labels.classes == {label: int((y == label).sum()) for label in y.unique().tolist()}
    assert found.labels.outputs == 5
    assert found.stages == (("0",), ("2",), ("4",))
    assert found.head == "4"
    upload, _ = uploaded(network(), batches())
    assert upload.spaces is not None
    assert found.spaces == {space.name: space.size for space in upload.spaces}
    methods = {one.name: one for one in found.methods}
    assert methods.keys() == {*maecho.METHODS, "echo-relay"}
    assert all(one.usable for one in found.methods)
    assert methods["fisher"].needs == "statistics=['fisher']"
    assert methods["echo-chain"].needs == "the network's code at the server"
    words = {one.name: one for one in maecho.check(transformer(), sequences()).methods}
    assert not words["echo-chain"].usable
    assert "no moments: the inputs are not one tensor of real numbers" in words["echo-chain"].needs
    assert words["regmean"].usable
    pictures = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    of_maps = {one.name: one for one in maecho.check(pictures, images()).methods}
    assert of_maps["pfnm"].needs.startswith("pfnm is for fully connected networks, got the layer '0'")
    assert of_maps["fedma"].usable


@pytest.mark.parametrize("rank", ["4x", "6x", None, 3, {"0": 2}, "20 kB"])
@pytest.mark.parametrize("sized", [True, False])
def test_the_size_is_near_the_upload_itself(rank: Any, sized: bool) -> None:
    data = batches()
    upload, _ = uploaded(network(), data, rank=rank)
    found = maecho.check(network(), data if sized else iter(data), rank=rank)
    sizes = {one.part: one for one in found.sizes}
    assert sizes.keys() == {"weights", *upload.statistics}
    total = sum(one.cut for one in found.sizes)
    assert upload.bytes() <= total <= 1.6 * upload.bytes()
    whole, _ = uploaded(network(), data, rank=None)
    for name in upload.statistics:
        assert whole.bytes((name,)) - whole.bytes(()) <= sizes[name].whole
        assert sizes[name].cut <= sizes[name].whole


def test_times() -> None:
    times = maecho.check(network(), batches()).times
    assert times is not None
    assert times.step is not None
    assert 0 < times.forward < 1
    assert 0 < times.step < 1
    assert times.statistics > times.forward
    assert times.batches == len(batches())
    seconds = times.batches * times.statistics + times.once
    assert times.seconds == seconds
    assert times.epochs == seconds / (times.batches * times.step)
    unknown = maecho.check(network(), iter(batches())).times
    assert unknown is not None
    assert (unknown.batches, unknown.seconds, unknown.epochs) == (None, None, None)


def test_a_step_of_training_takes_longer_than_a_forward_pass() -> None:
    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 3))  # milliseconds, not noise
    times = maecho.check(wide, [(torch.randn(256, 512, generator=rng()), torch.arange(256) % 3)]).times
    assert times is not None
    assert times.step is not None
    assert times.step > times.forward


@pytest.mark.parametrize("make", [network, resnet, transformer, twins])
def test_the_text_fits_a_terminal(make: Callable[[], nn.Module]) -> None:
    data = {resnet: images, transformer: sequences}.get(make, batches)()  # type: ignore[call-overload]
    shown = str(maecho.check(make(), data))
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("layer ", "Labels: ", "Echo: ", "upload, estimated", "Time, estimated: ", "method "):
        assert part in shown


def test_equal_blocks_are_one_line() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(12)), nn.Linear(12, 5))
    lines = str(maecho.check(model, batches())).splitlines()
    assert any(line.split()[:2] == ["0-11.0", "Linear"] and "(12 alike)" in line for line in lines)


def test_hostile_names_stay_text() -> None:
    model = nn.Sequential()
    model.add_module("\x1b[2J", nn.Linear(12, 5))
    assert "\x1b" not in str(maecho.check(model, batches()))


def test_an_error_is_an_error_of_the_upload_too() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = NAN
    (text,) = maecho.check(model, batches()).of("error")
    with pytest.raises(maecho.InputError) as caught:
        maecho.make_upload(model, batches(), "ann")
    assert text.startswith(str(caught.value).removeprefix("ann: "))


def test_a_finding_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Finding("note", "text").text = "other"  # type: ignore[misc]
