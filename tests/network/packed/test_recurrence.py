"""Recurrent modules split into their matrices compute what torch's modules do, and show what enters each matrix."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import maecho
from maecho.network.packed.recurrence import SplitCell, SplitRecurrence
from maecho.network.packed.twin import twin_of
from support.clients import rng

OPTIONS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (kind, {"num_layers": 2, "bidirectional": two, "bias": bias, "batch_first": first, **more})
    for kind, more in (
        (nn.RNN, {"nonlinearity": "tanh"}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.GRU, {}),
        (nn.LSTM, {}),
        (nn.LSTM, {"proj_size": 3}),
    )
    for two, bias, first in itertools.product((False, True), repeat=3)
]


def module(kind: type[nn.Module], seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(4, 5, **options).double().eval()


def inputs(case: str, batch_first: bool) -> Tensor | PackedSequence:
    if case == "packed":
        rows = [torch.randn(n, 4, generator=rng(n), dtype=torch.float64) for n in (2, 5, 3)]
        return pack_sequence(rows, enforce_sorted=False)
    x = torch.randn(3, 6, 4, generator=rng(1), dtype=torch.float64)
    return x[0] if case == "alone" else x if batch_first else x.transpose(0, 1)


def flat(out: Any) -> list[Tensor]:
    if isinstance(out, tuple):
        return [tensor for part in out if part is not None for tensor in flat(part)]
    return [out]


@pytest.mark.parametrize("graph", [False, True], ids=["at once", "step by step"])
@pytest.mark.parametrize("case", ["batch", "alone", "packed"])
@pytest.mark.parametrize("start", [False, True])
def test_it_is_torchs_module(start: bool, case: str, graph: bool) -> None:
    for kind, options in OPTIONS:
        whole = module(kind, **options)
        split = SplitRecurrence(whole)
        x, hx = inputs(case, options["batch_first"]), None
        if start:
            count = 2 * (1 + options["bidirectional"])
            of_batch = () if case == "alone" else (3,)
            hx = torch.randn(count, *of_batch, options.get("proj_size") or 5, generator=rng(2), dtype=torch.float64)
            if kind is nn.LSTM:
                hx = (hx, torch.randn(count, *of_batch, 5, generator=rng(3), dtype=torch.float64))
        with torch.set_grad_enabled(graph):
            expected, got = flat(whole(x, hx)), flat(split(x, hx))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("options", [{}, {"bias": False}])
def test_cells(kind: type[nn.Module], options: dict[str, Any]) -> None:
    whole = module(kind, **options)
    cells = [whole] if kind is not nn.RNNCell else [whole, module(kind, nonlinearity="relu", **options)]
    for cell in cells:
        split = SplitCell(cell)
        for x in (inputs("batch", True)[:, 0], inputs("alone", True)[0]):
            state = None
            for _ in range(3):
                new = cell(x, state)
                torch.testing.assert_close(split(x, state), new)
                state = new


@pytest.mark.parametrize(("kind", "options"), OPTIONS[::3])
def test_the_state_dict_goes_back(kind: type[nn.Module], options: dict[str, Any]) -> None:
    whole = module(kind, **options)
    pair = twin_of(nn.Sequential(whole, nn.Linear(2, 2)))
    state = pair.packed(pair.network.state_dict())
    assert list(state) == list(pair.names)
    assert all(torch.equal(state[f"0.{name}"], tensor) for name, tensor in whole.state_dict().items())


class Reader(nn.Module):
    """A recurrent module over [examples, steps, 4], and a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any):
        super().__init__()
        self.recurrent = kind(4, 5, batch_first=True, **options)
        width = (options.get("proj_size") or 5) * (1 + bool(options.get("bidirectional")))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.recurrent(x)
        return self.head(out[:, -1])  # type: ignore[no-any-return]


def reader(kind: type[nn.RNNBase], **options: Any) -> Reader:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Reader(kind, **options).double().eval()


def data(n: int = 12) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(n, 4, 4, generator=rng(7), dtype=torch.float64)
    return list(zip(x.split(5), (torch.arange(n) % 3).split(5), strict=True))


def steps(model: Reader, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """By a plain loop over examples and steps: the inputs and the hidden states that each step of layer 0 reads."""
    read, hidden = [], []
    r: Any = model.recurrent
    for example in x:
        h, c = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        for row in example:
            read.append(row)
            hidden.append(h)
            a = r.weight_ih_l0 @ row + r.bias_ih_l0
            b = r.weight_hh_l0 @ h + r.bias_hh_l0
            if r.mode == "LSTM":
                i, f, g, o = (a + b).split(5)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            elif r.mode == "GRU":
                reset, keep = torch.sigmoid(a[:5] + b[:5]), torch.sigmoid(a[5:10] + b[5:10])
                h = (1 - keep) * torch.tanh(a[10:] + reset * b[10:]) + keep * h
            else:
                h = torch.tanh(a + b)
    return read, hidden


def with_one(rows: list[Tensor]) -> Tensor:
    found = torch.stack(rows).detach()
    return torch.cat([found, torch.ones(len(found), 1, dtype=torch.float64)], 1)


@pytest.mark.parametrize("statistics", [["gram"], ["gram", "gradients"]], ids=["at once", "step by step"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_grams_are_those_of_a_plain_loop(kind: type[nn.RNNBase], statistics: list[str]) -> None:
    model = reader(kind)
    upload = maecho.make_upload(model, data(), "ann", statistics, rank=None)
    assert [layer.name for layer in upload.layers] == ["recurrent.ih_l0", "recurrent.hh_l0", "head"]
    read, hidden = steps(model, torch.cat([x for x, _ in data()]))
    for name, rows in (("ih_l0", read), ("hh_l0", hidden)):
        X = with_one(rows)
        torch.testing.assert_close(
            upload.statistics["gram"][f"recurrent.{name}"].dense()[0].double(), X.T @ X, rtol=1e-5, atol=1e-5
        )


def test_hidden_states_of_packed_sequences_and_of_the_reverse_direction() -> None:
    whole = module(nn.GRU, bidirectional=True)
    split = SplitRecurrence(whole)
    sequences = [torch.randn(n, 4, generator=rng(n), dtype=torch.float64) for n in (2, 5, 3)]
    seen: dict[str, Tensor] = {}
    for name in ("hh_l0", "hh_l0_reverse"):
        split.part(name).register_forward_pre_hook(
            lambda m, args, name=name: seen.update({name: args[0].reshape(-1, 5)})
        )
    with torch.no_grad():
        split(pack_sequence(sequences, enforce_sorted=False))
        outs = [whole(s.unsqueeze(1))[0].squeeze(1) for s in sequences]
    start = torch.zeros(1, 5, dtype=torch.float64)
    before = [torch.cat([start, out[:-1, :5]]) for out in outs]
    after = [torch.cat([out[1:, 5:], start]) for out in outs]
    for name, rows in (("hh_l0", torch.cat(before)), ("hh_l0_reverse", torch.cat(after))):
        torch.testing.assert_close(seen[name].T @ seen[name], rows.T @ rows)
        assert len(seen[name]) == 10


def test_rows_of_a_packed_sequence_do_not_pass_for_examples() -> None:
    split = SplitRecurrence(module(nn.RNN))
    seen: list[Tensor] = []
    split.part("ih_l0").register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    one_step = pack_sequence([torch.randn(1, 4, dtype=torch.float64) for _ in range(3)], enforce_sorted=False)
    with torch.no_grad():
        split(one_step)
    assert seen[0].shape == (1, 3, 4)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_fisher_is_that_of_single_examples(kind: type[nn.RNNBase]) -> None:
    model = reader(kind, bidirectional=True)
    upload = maecho.make_upload(model, data(), "ann", ["fisher"], rank=None)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x in torch.cat([x for x, _ in data()]):
        log_p = model(x.unsqueeze(0))[0].log_softmax(-1)
        for c in range(3):
            gradients = torch.autograd.grad(log_p[c], list(model.parameters()), retain_graph=True)
            for name, gradient in zip(expected, gradients, strict=True):
                expected[name] += log_p[c].exp().detach() * gradient**2
    for name, F in upload.statistics["fisher"].items():
        stored = name.replace("ih_l0", "l0.ih").replace("hh_l0", "l0.hh")
        if name.startswith("recurrent"):
            _, part, what = name.split(".")
            stored = f"recurrent.{what}_{part}"
        torch.testing.assert_close(F.double(), expected[stored].double(), rtol=1e-5, atol=1e-9)
    assert len(upload.statistics["fisher"]) == len(expected)


class Lengths(Reader):
    """Packs its sequences, whose lengths are the numbers of rows that are not 0."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x.abs().sum(-1) > 0).sum(1).cpu()
        _, last = self.recurrent(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch.func has no rule for packing
@pytest.mark.parametrize("lengths", [[1, 4, 2, 3, 4], [4, 4, 4, 4, 4], [1, 1, 1, 1, 1]])
def test_packed_sequences_of_a_network(lengths: list[int]) -> None:
    model = Lengths(nn.LSTM).double().eval()
    x, y = data(5)[0]
    x = x.clone()
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 0
    upload = maecho.make_upload(model, [(x, y)], "ann", ["gram", "fisher"], rank=None)
    hidden = [h for row, length in zip(x, lengths, strict=True) for h in steps(model, row[None, :length])[1]]
    X, found = with_one(hidden), upload.statistics["gram"]["recurrent.hh_l0"].dense()[0].double()
    torch.testing.assert_close(found, X.T @ X, rtol=1e-5, atol=1e-5)
    F = torch.zeros(20, 5, dtype=torch.float64)
    for row in x:
        log_p = model(row[None])[0].log_softmax(-1)
        for c in range(3):
            (g,) = torch.autograd.grad(log_p[c], [model.recurrent.weight_hh_l0], retain_graph=True)
            F += log_p[c].exp().detach() * g**2
    torch.testing.assert_close(upload.statistics["fisher"]["recurrent.hh_l0.weight"].double(), F, rtol=1e-5, atol=1e-9)


class Counting(nn.Module):
    """Counts how often it runs."""

    ran = 0

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.middle, self.head = middle, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        Counting.ran += 1
        return self.head(self.middle(x)[0][:, -1])  # type: ignore[no-any-return]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def test_an_upload_takes_one_batch_more_than_there_are() -> None:
    def runs(middle: nn.Module, n: int) -> int:
        Counting.ran = 0
        maecho.make_upload(Counting(middle).double(), data(n), "ann", ["gram"])
        return Counting.ran

    assert runs(nn.LSTM(4, 4, batch_first=True), 30) == runs(Pair(), 30) + 1
    assert runs(nn.LSTM(4, 4, batch_first=True), 30) == runs(nn.LSTM(4, 4, batch_first=True), 10) + 4


def test_a_head_is_no_gate() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.recurrent = nn.Linear(4, 4), nn.RNN(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrent(self.first(x))[1][0]  # type: ignore[no-any-return]

    assert maecho.make_upload(Last().double(), data(), "ann", ["gram"]).head is None


@pytest.mark.parametrize(("kind", "options", "ends"), [
    (nn.LSTM, {}, ["_l0"]),
    (nn.GRU, {"bidirectional": True}, ["_l0", "_l0_reverse"]),
])  # fmt: skip
def test_a_relay_names_what_it_averages_as_the_model_does(
    kind: type[nn.RNNBase], options: dict[str, Any], ends: list[str]
) -> None:
    model = reader(kind, **options)
    named = [f"recurrent.weight_hh{end}, recurrent.bias_hh{end} (on hidden states)" for end in ends]
    with pytest.warns(UserWarning, match=f"that can be fitted: {re.escape(', '.join(named))}$"):
        merged = maecho.relay(model, [(model, data())], progress=False)
    assert set(merged.averaged) == {f"recurrent.{name}_hh{end}" for name in ("weight", "bias") for end in ends}
