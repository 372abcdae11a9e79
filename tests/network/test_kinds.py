"""Every kind of layer as a matrix, and a kind that a user registers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.network import Layer, Place, derive, kinds, layers, verify
from maecho.network.spaces import load
from maecho.network.stages import plan
from maecho.statistics import STATISTICS
from support.clients import batches, rng
from support.contract import close
from support.networks import with_running_statistics
from support.tiny import QUICK

CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 11)),
    "1d strided, dilated, grouped": (nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=3, groups=2), (2, 4, 13)),
    "2d": (nn.Conv2d(3, 8, 3), (2, 3, 9, 7)),
    "2d without bias": (nn.Conv2d(3, 8, 3, bias=False), (2, 3, 9, 7)),
    "2d strided": (nn.Conv2d(3, 8, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 3, 9, 8)),
    "2d dilated": (nn.Conv2d(3, 8, 3, dilation=(1, 2), padding=2), (2, 3, 9, 8)),
    "2d same": (nn.Conv2d(3, 8, (4, 3), padding="same", dilation=(2, 1)), (2, 3, 9, 8)),
    "2d valid": (nn.Conv2d(3, 8, 3, padding="valid"), (2, 3, 9, 8)),
    "2d circular": (nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), (2, 3, 9, 8)),
    "2d reflect": (nn.Conv2d(3, 8, 3, padding=2, padding_mode="reflect"), (2, 3, 9, 8)),
    "2d replicate same": (nn.Conv2d(3, 8, (4, 3), padding="same", padding_mode="replicate"), (2, 3, 9, 8)),
    "2d grouped": (nn.Conv2d(6, 9, 3, groups=3, padding=1), (2, 6, 5, 6)),
    "2d depthwise": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 6)),
    "2d one by one": (nn.Conv2d(4, 5, 1), (2, 4, 5, 6)),
    "2d one image": (nn.Conv2d(3, 8, 3), (3, 9, 7)),
    "3d": (nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=1), (2, 2, 5, 6, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_rows_times_matrix_is_the_convolution(name: str) -> None:
    module, shape = CONVOLUTIONS[name]
    module = module.double()
    x = torch.randn(shape, generator=rng(), dtype=torch.float64)
    layer = layers.read(nn.Sequential(module)).layers["0"]
    rows = kinds.rows(module, x)
    if layer.bias:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)
    got = rows @ layer.matrix(nn.Sequential(module).state_dict()).mT  # [g, batch · places, out / g]
    expected = module(x)
    channels = expected.movedim(-len(module.kernel_size) - 1, -1).reshape(-1, module.groups, got.shape[-1])
    torch.testing.assert_close(got, channels.transpose(0, 1))


def test_linear_takes_any_leading_axes() -> None:
    module = nn.Linear(5, 3).double()
    x = torch.randn(2, 7, 5, generator=rng(), dtype=torch.float64)
    rows = kinds.rows(module, x)
    torch.testing.assert_close((rows @ module.weight.T + module.bias)[0], module(x).reshape(-1, 3))


def test_an_embedding_is_a_matrix_over_one_hot_rows() -> None:
    model = nn.Sequential(nn.Embedding(6, 4))
    layer = layers.read(model).layers["0"]
    tokens = torch.tensor([[1, 5, 1], [0, 1, 2]])
    one_hot = torch.nn.functional.one_hot(kinds.rows(model[0], tokens)[0], 6).float()
    torch.testing.assert_close(one_hot @ layer.matrix(model.state_dict())[0].T, model(tokens).reshape(-1, 4))


class InputsFirst(nn.Module):
    """y = x W + b with W stored [in, out], like the Conv1D of Hugging Face."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Derived(InputsFirst):
    """A subclass that computes something else, so its neurons cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cumsum(-1)


class InputsFirstKind(kinds.Kind):
    transposed = True


kinds.register(InputsFirst, InputsFirstKind())
WIDTHS = {"0": (12, 9), "3": (9, 7), "5": (7, 5)}


def theirs(seed: int) -> nn.Sequential:
    """A network of layers of that kind, with a BatchNorm that has seen data."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        one, two, three = (InputsFirst(*widths) for widths in WIDTHS.values())
        model = nn.Sequential(one, nn.BatchNorm1d(9), nn.ReLU(), two, nn.ReLU(), three).double()
    return with_running_statistics(model, batches(seed, dtype=torch.float64)[0][0])  # type: ignore[return-value]


def linear(seed: int) -> nn.Sequential:
    """The same network written with nn.Linear."""
    model = theirs(seed)
    state = turned(model.state_dict())
    for name, widths in WIDTHS.items():
        model[int(name)] = nn.Linear(*widths).double()
    return load(model, state).eval()  # type: ignore[return-value]


def turned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state_dict of one of the two networks to the other."""
    return {name: tensor.T.clone() if tensor.dim() == 2 else tensor.clone() for name, tensor in state.items()}


def uploads(make: Callable[[int], nn.Module]) -> list[maecho.Upload]:
    return [
        maecho.make_upload(make(i), batches(i, dtype=torch.float64), f"client-{i}", STATISTICS, rank=None)
        for i in range(2)
    ]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    close(turned(one), dict(other), 1e-6)


def test_the_two_networks_are_one_function() -> None:
    x = batches(dtype=torch.float64)[0][0]
    torch.testing.assert_close(theirs(0)(x), linear(0)(x))


def test_rows_times_the_matrix_of_a_users_kind_is_what_it_computes() -> None:
    module, x = InputsFirst(5, 3).double(), torch.randn(2, 7, 5, generator=rng(), dtype=torch.float64)
    layer = layers.read(module).layers[""]
    assert layer == Layer("", "weight", "bias", transposed=True)
    rows = layers.complete(kinds.rows(module, x), layer)
    found = rows @ layer.matrix(module.state_dict()).mT
    torch.testing.assert_close(found, kinds.output_rows(module, module(x)))
    assert kinds.inputs(module) == 5


@pytest.mark.parametrize("method", sorted(maecho.METHODS))
def test_every_method_merges_a_users_kind_as_it_merges_linear_layers(method: str) -> None:
    options: dict[str, Any] = QUICK.get(method, {}) | ({"draws": 400} if method == "echo-chain" else {})
    with_model = method in ("dense", "echo-chain")
    merged = [
        maecho.aggregate(uploads(make), method, **options, **({"model": make(0)} if with_model else {}))
        for make in (theirs, linear)
    ]
    same(*merged)


def test_activations_of_a_users_kind_are_compared() -> None:
    same(*(maecho.aggregate(uploads(make), "ot", metric="activations", model=make(0)) for make in (theirs, linear)))


def test_a_relay_fits_a_users_kind_with_the_batchnorm_behind_it() -> None:
    assert [unit.norm for unit in plan(theirs(0), torch.randn(4, 12).double()).stages[0]] == ["1"]
    clients = [[(make(i), batches(i, dtype=torch.float64)) for i in range(2)] for make in (theirs, linear)]
    same(*(maecho.relay(make(5), given) for make, given in zip((theirs, linear), clients, strict=True)))


def test_statistics_of_a_users_kind_are_those_of_linear_layers(tmp_path: Path) -> None:
    for own, other in zip(uploads(theirs), uploads(linear), strict=True):
        assert own.head == other.head == "5"
        own.save(tmp_path / "a")
        back = maecho.Upload.load(tmp_path / "a")
        assert back.layers == own.layers
        assert back.fingerprint == own.fingerprint != other.fingerprint
        tensors = other.tensors()
        for name, tensor in own.tensors().items():
            turn = name.startswith(("weights/", "fisher/")) and tensor.dim() == 2
            found, expected = tensor.T if turn else tensor, tensors[name]
            if name.endswith("/basis"):  # eigenvectors may differ in sign
                found, expected = found @ found.mT, expected @ expected.mT
            torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}")


def test_neurons_of_a_users_kind_are_followed_and_may_grow() -> None:
    model, x = theirs(0), batches(dtype=torch.float64)[0][0]
    spaces = derive(model, x)
    assert [space.size for space in spaces] == [9, 7]
    assert Place("0.weight", 1) in spaces[0].places
    assert Place("3.weight", 0) in spaces[0].places
    verify(model, spaces, x)


def test_layers_of_a_users_kind_may_grow() -> None:
    made = [maecho.aggregate(uploads(make), "pfnm", gamma=50.0) for make in (theirs, linear)]
    assert made[0]["0.weight"].shape[1] > 9
    x = batches(dtype=torch.float64)[0][0]
    torch.testing.assert_close(load(theirs(0), made[0])(x), load(linear(0), made[1])(x))


def test_neurons_of_a_type_that_was_not_itself_registered_are_fixed() -> None:
    model = nn.Sequential(InputsFirst(12, 9), Derived(9, 7), nn.Linear(7, 5))
    assert layers.read(model).layers.keys() == {"0", "1", "2"}, "they are matrices all the same"
    assert derive(model, torch.randn(3, 12)) == ()


class Scores(nn.Module):
    """A layer with one number for each output and token, [out, tokens], and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table.T[tokens] + self.shift


class ScoresKind(kinds.Embedding):
    weight, bias = "table", "shift"
    transposed = False

    def frozen_token(self, module: Scores) -> None:
        return None


kinds.register(Scores, ScoresKind())


@pytest.mark.filterwarnings("ignore:.*not sent")
def test_a_users_kind_may_take_tokens_and_name_its_parameters() -> None:
    """The weight is merged over tokens. One-hot rows have no column for a bias, so the bias is averaged."""
    tokens = torch.arange(24).reshape(8, 3) % 6
    data, made = [(tokens, torch.arange(8) % 5)], []
    with torch.random.fork_rng():
        for seed in range(2):
            torch.manual_seed(seed)
            made.append(nn.Sequential(Scores(), nn.Flatten(), nn.Linear(12, 5)))
    given = [maecho.make_upload(one, data, f"{i}", STATISTICS, rank=None) for i, one in enumerate(made)]
    assert given[0].layers[0] == Layer("0", "0.table", one_hot=True)
    torch.testing.assert_close(given[0].statistics["gram"]["0"].dense()[0], torch.full((6,), 4.0).double().diag())
    for method in ("regmean", "fisher", "kronecker", "ma-echo"):
        merged = maecho.aggregate(given, method)
        assert merged["0.table"].shape == (4, 6)
        assert "0.table" not in merged.averaged
    average = (made[0][0].table + made[1][0].table) / 2
    merged = maecho.aggregate(given, "regmean")
    torch.testing.assert_close(merged["0.table"], average.detach())
    assert "0.shift" in merged.averaged
    alone = maecho.relay(made[1], [(made[0], data)])
    for name, tensor in made[0].state_dict().items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-3, atol=1e-3)


def test_what_was_not_registered_is_named() -> None:
    for function in (kinds.rows, kinds.output_rows, kinds.mean_rows, kinds.without_bias):
        with pytest.raises(TypeError, match="ReLU is not known as a matrix"):
            function(nn.ReLU(), torch.zeros(2))
    with pytest.raises(TypeError, match=r"must be registered for a class of nn\.Module, got 'Conv1D'"):
        kinds.register("Conv1D", kinds.Kind())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ReLU must be registered with an object of a class of Kind, got <class"):
        kinds.register(nn.ReLU, kinds.Kind)  # type: ignore[arg-type]


ONE_EXAMPLE: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Linear(5, 3), torch.randn(5, generator=rng())),
    "convolution": (nn.Conv2d(3, 8, 3), torch.randn(3, 9, 7, generator=rng())),
    "embedding": (nn.Embedding(6, 4, padding_idx=2), torch.tensor(3)),
}


@pytest.mark.parametrize("name", ONE_EXAMPLE)
def test_one_example_without_a_batch_axis_is_told_from_a_batch(name: str) -> None:
    module, x = ONE_EXAMPLE[name]
    z = module(x)
    assert kinds.unbatched(module, x)
    assert not kinds.unbatched(module, x.unsqueeze(0))
    batch, out = torch.stack([x] * 4), torch.stack([z] * 4)
    assert kinds.examples_first(module, batch, out, 4)
    assert not kinds.examples_first(module, batch, out, 5)
    assert not kinds.examples_first(module, x, z, len(z))
    torch.testing.assert_close(kinds.rows(module, batch)[:, :1], kinds.rows(module, x.unsqueeze(0))[:, :1])
    assert kinds.inputs(module) == {"linear": 5, "convolution": 27, "embedding": 6}[name]
    assert kinds.frozen_token(module) == (2 if name == "embedding" else None)


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_without_its_bias_a_layer_is_its_weight_alone(name: str) -> None:
    module, x = ONE_EXAMPLE[name]
    bare = kinds.without_bias(module, module(x.unsqueeze(0)))
    with torch.no_grad():
        module.get_parameter("bias").zero_()
    torch.testing.assert_close(bare, module(x.unsqueeze(0)), rtol=1e-5, atol=1e-6)
    without = nn.Conv2d(3, 8, 3, bias=False)
    z = torch.zeros(1, 8, 2, 2)
    assert kinds.without_bias(without, z) is z


def test_rows_held_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "CHUNK", 100)
    assert kinds.examples_at_once(nn.Linear(5, 3), torch.zeros(8, 5)) == 20
    assert kinds.examples_at_once(nn.Conv1d(2, 3, 5), torch.zeros(8, 2, 4)) == 2
    assert kinds.examples_at_once(nn.Conv1d(2, 3, 5), torch.zeros(8, 2, 40)) == 1
    assert kinds.examples_at_once(nn.LayerNorm(5), torch.zeros(8, 5)) == 20
    assert kinds.examples_at_once(nn.Linear(5, 3), torch.zeros(0, 5)) == 100


SECRETS = {"kernel_size", "padding_idx", "in_features", "out_features", "in_channels", "out_channels"}


def test_nothing_outside_the_room_asks_what_a_layer_is() -> None:
    package = Path(maecho.__file__).parent
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "network"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            word = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            assert not (isinstance(word, str) and word in SECRETS), f"{path.name} asks for {word}"
