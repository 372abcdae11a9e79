"""Every method on networks that keep several matrices in a parameter or compute a weight: one client comes back, twins
agree, and the result loads into the same network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import maecho
from maecho.network.packed.twin import twin_of
from maecho.rounds.merging import _earlier, _summed
from support.clients import rng

STATISTICS = ["gram", "projector", "classes", "moments", "features", "fisher", "gradients"]
METHODS = ["fedavg", "ma-echo", "regmean", "fisher", "kronecker", "ot", "ma-echo+ot", "echo-chain", "dense"]
OPTIONS: dict[str, dict[str, Any]] = {
    "echo-chain": {"draws": 300},
    "dense": {
        "epochs": 1,
        "generator_steps": 1,
        "student_steps": 1,
        "batch_size": 4,
        "width": 2,
        "learning_rate": 1e-9,
    },
}


class Sequences(nn.Module):
    """A module over [examples, 5, 8] between two layers."""

    def __init__(self, middle: nn.Module, run: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(6, 8), middle, nn.Linear(8, 4)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.middle, self.first(x)).mean(1))  # type: ignore[no-any-return]


def attended(module: Any, x: Tensor) -> Tensor:
    return x + module(x, x, x)[0]  # type: ignore[no-any-return]


def padded(module: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[0], 5, dtype=torch.bool)
    mask[:, 4] = True
    return module(x, src_key_padding_mask=mask)[:, :4]  # type: ignore[no-any-return]


def causal(module: Any, x: Tensor) -> Tensor:
    return module(x, mask=nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)  # type: ignore[no-any-return]


def translated(module: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    return module(x, x[:, :3], tgt_mask=mask, tgt_is_causal=True)  # type: ignore[no-any-return]


def recurrent(module: Any, x: Tensor) -> Tensor:
    return module(x)[0]  # type: ignore[no-any-return]


def looped(module: Any, x: Tensor) -> Tensor:
    state, out = None, []
    for row in x.unbind(1):
        state = module(row, state)
        out.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(out, 1)


def plain(module: Any, x: Tensor) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of nested tensors
        return nn.TransformerEncoder(layer, 2)


MODELS: dict[str, Callable[[], Sequences]] = {
    "attention": lambda: Sequences(nn.MultiheadAttention(8, 2, batch_first=True), attended),
    "attention without bias": lambda: Sequences(nn.MultiheadAttention(8, 2, batch_first=True, bias=False), attended),
    "attention of other widths": lambda: Sequences(nn.MultiheadAttention(8, 2, kdim=8, vdim=8), attended),
    "encoder": lambda: Sequences(encoder(), padded),
    "encoder, norm first": lambda: Sequences(encoder(norm_first=True, activation="gelu"), causal),
    "transformer": lambda: Sequences(nn.Transformer(8, 2, 1, 1, 12, batch_first=True), translated),
    "LSTM": lambda: Sequences(nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True), recurrent),
    "GRU": lambda: Sequences(nn.GRU(8, 8, batch_first=True), recurrent),
    "RNN": lambda: Sequences(nn.RNN(8, 8, bias=False, batch_first=True), recurrent),
    "LSTM cell": lambda: Sequences(nn.LSTMCell(8, 8), looped),
    "weight norm": lambda: Sequences(parametrizations.weight_norm(nn.Linear(8, 8)), plain),
    "spectral norm": lambda: Sequences(parametrizations.spectral_norm(nn.Linear(8, 8)), plain),
}


LOOPS = ("LSTM", "GRU", "RNN", "LSTM cell")


def averaging(hidden: bool) -> AbstractContextManager[object]:
    """Inside, a warning must name the matrices on hidden states."""
    return pytest.warns(UserWarning, match="on hidden states") if hidden else nullcontext()


def made(name: str) -> Sequences:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]().eval()


def data(seed: int) -> list[tuple[Tensor, Tensor]]:
    draw = rng(seed)
    x, y = torch.randn(24, 5, 6, generator=draw), torch.randint(0, 4, (24,), generator=draw)
    return list(zip(x.split(10), y.split(10), strict=True))


def gap(state: dict[str, Tensor], model: nn.Module) -> tuple[float, float]:
    """How far the outputs are apart, and how far the probabilities are on average."""
    merged, x = copy.deepcopy(model), data(9)[0][0]
    merged.load_state_dict(state)
    with torch.no_grad():
        one, other = merged(x), model(x)
    apart = (one.softmax(-1) - other.softmax(-1)).abs().mean()
    return float((one - other).norm() / other.norm()), float(apart)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
def test_alone_and_twins(name: str) -> None:
    model = made(name)
    uploads = [maecho.make_upload(model, data(seed), f"c{seed}", STATISTICS, rank=None) for seed in range(2)]
    assert gap(uploads[0].state_dict(), model)[0] < 1e-6
    places = [place.tensor for space in uploads[0].spaces or () for place in space.places]
    if "norm" not in name.split():
        assert not any(tensor.startswith("middle.") for tensor in places), "they keep their order"
    for method in METHODS:
        if uploads[0].spaces is None and "ot" in method.split("+"):
            continue
        options = {"model": model, **OPTIONS.get(method, {})}
        with averaging(name in LOOPS and method == "echo-chain"):
            alone = maecho.aggregate(uploads[:1], method, **options)
            twins = maecho.aggregate(uploads, method, **options)
        assert alone.keys() == model.state_dict().keys()
        assert gap(alone, model)[0] < 1e-4, method
        assert gap(twins, model)[method == "echo-chain"] < (0.05 if method == "echo-chain" else 1e-4), method
        assert set(twins.averaged) <= model.state_dict().keys()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
def test_the_relay_alone_and_with_twins(name: str) -> None:
    model = made(name)
    loops = name in LOOPS
    with averaging(loops):
        alone = maecho.relay(model, [(model, data(0))])
        twins = maecho.relay(model, [(model, data(0)), (model, data(1))])
    assert gap(alone, model)[0] < 1e-4
    assert gap(twins, model)[1] < 0.05
    assert all("_hh" in averaged for averaged in twins.averaged) if loops else twins.averaged == ()
    assert bool(twins.averaged) == loops


def test_different_clients_are_merged_and_not_only_averaged() -> None:
    """RegMean on an attention's parts is the least-squares solution on the rows that enter each of them."""
    models = [made("attention") for _ in range(2)]
    with torch.no_grad():
        for p in models[1].parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=rng(5)))
    uploads = [maecho.make_upload(m, data(i), f"c{i}", ["gram"], rank=None) for i, m in enumerate(models)]
    merged = maecho.aggregate(uploads, "regmean", ridge=0.0)
    sums, products = torch.zeros(9, 9, dtype=torch.float64), torch.zeros(8, 9, dtype=torch.float64)
    for i, model in enumerate(models):
        with torch.no_grad():
            rows = model.first(torch.cat([x for x, _ in data(i)])).reshape(-1, 8).double()
        rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
        attention: Any = model.middle
        W = torch.cat([attention.in_proj_weight[8:16], attention.in_proj_bias[8:16, None]], 1).detach().double()
        sums += rows.T @ rows
        products += W @ rows.T @ rows
    expected = products @ torch.linalg.inv(sums)
    torch.testing.assert_close(merged["middle.in_proj_weight"][8:16].double(), expected[:, :8], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(merged["middle.in_proj_bias"][8:16].double(), expected[:, 8], rtol=1e-3, atol=1e-3)


def test_by_activations_ot_moves_the_neurons_beside_an_attention() -> None:
    class Wide(Sequences):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.wide(super().forward(x)).relu()
            return self.last(hidden)  # type: ignore[no-any-return]

        def __init__(self) -> None:
            super().__init__(nn.GRU(8, 8, batch_first=True), recurrent)
            self.wide, self.last = nn.Linear(4, 7), nn.Linear(7, 4)

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Wide().eval()
    turned = copy.deepcopy(model)
    order = torch.randperm(7, generator=rng(1))
    with torch.no_grad():
        turned.wide.weight.copy_(model.wide.weight[order])
        turned.wide.bias.copy_(model.wide.bias[order])
        turned.last.weight.copy_(model.last.weight[:, order])
    both = [maecho.make_upload(m, data(i), f"c{i}", rank=None) for i, m in enumerate((model, turned))]
    assert [space.name for space in both[0].spaces or ()] == ["head", "wide"]
    for metric in ("weights", "activations"):
        merged = maecho.aggregate(both, "ot", metric=metric, model=model)
        assert gap(merged, model)[0] < 1e-4


def test_rounds_keep_the_sums_of_earlier_rounds() -> None:
    model = made("LSTM")
    upload = maecho.make_upload(model, data(0), "c0", ["gram"], rank=None)
    earlier = _earlier(_summed([upload], 1.0), [upload], twin_of(model).network.state_dict())
    assert earlier is not None
    assert earlier.fingerprint == upload.fingerprint
    assert gap(maecho.aggregate([upload, earlier], "regmean"), model)[0] < 1e-4
