"""The twin keeps what is tied tied, leaves alone what somebody changed, and is compared with the network."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.network.packed.attention import SplitAttention
from maecho.network.packed.linears import Split
from maecho.network.packed.recurrence import SplitRecurrence
from maecho.network.packed.twin import twin_of
from support.clients import rng
from support.tiny import refused_input


def splits(model: nn.Module) -> list[str]:
    return [name for name, module in twin_of(model).network.named_modules() if isinstance(module, Split)]


def test_a_network_with_nothing_to_split_is_its_own_twin() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train()
    twin = twin_of(model, always_copy=False)
    assert twin.network is model
    assert model.training
    assert twin_of(model).network is not model
    assert twin.stored == twin_of(model).stored == ()


def test_parameters_that_are_tied_stay_tied() -> None:
    one, two = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)
    two.in_proj_weight = one.in_proj_weight
    pair = twin_of(nn.ModuleList([one, two]))
    first, second = pair.network
    assert first.q.weight is second.q.weight
    assert first.q.bias is not second.q.bias
    state = pair.packed(pair.network.state_dict())
    assert torch.equal(state["0.in_proj_weight"], state["1.in_proj_weight"])


def test_what_cannot_stay_tied_stays_whole() -> None:
    lstm, attention, plain = nn.LSTM(4, 3), nn.MultiheadAttention(4, 2), nn.Linear(4, 12)
    plain.weight, other = attention.in_proj_weight, nn.LSTM(4, 3)
    model = nn.ModuleList([lstm, attention, plain, other])
    assert splits(model) == ["0", "3"]
    assert isinstance(twin_of(model).network.get_submodule("1"), nn.MultiheadAttention)
    other.weight_ih_l0 = nn.Linear(4, 12).weight
    plain.weight = other.weight_ih_l0
    assert splits(model) == ["0", "1"]


def test_modules_that_somebody_changed_stay_whole() -> None:
    class Own(nn.LSTM):
        pass

    patched: Any = nn.GRU(4, 3)
    patched.forward = lambda x: (2 * x, None)
    hooked = nn.RNN(4, 3)
    hooked.register_forward_hook(lambda *_: None)
    assert splits(nn.ModuleList([Own(4, 3), patched, hooked, nn.LSTM(4, 3)])) == ["3"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attn = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        return self.head(self.attn(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(12, 3, 4, generator=rng(1))
    return list(zip(x.split(5), (torch.arange(12) % 3).split(5), strict=True))


@pytest.mark.parametrize(("split", "name"), [(SplitRecurrence, "lstm (LSTM)"), (SplitAttention, "attn (Multihead")])
def test_a_split_that_computes_something_else_is_not_used(
    split: type[Split], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = split.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, *rest = right(self, *args, **kwargs)
        return (1.01 * out, *rest)

    monkeypatch.setattr(split, "forward", wrong)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        upload = maecho.make_upload(net(), data(), "ann", ["gram"], rank=None)
    assert any("averaged without statistics" in str(w.message) and name in str(w.message) for w in caught)
    kind = name.split()[0]
    assert not any(layer.name.startswith(f"{kind}.") and "out_proj" not in layer.name for layer in upload.layers)
    with refused_input(f"client 0: {kind!r} must compute what torch's", "got something else"):
        maecho.relay(net(), [(net(), data())])
    monkeypatch.undo()
    full = maecho.make_upload(net(), data(), "ann", ["gram"], rank=None)
    torch.testing.assert_close(upload.statistics["gram"]["head"].dense(), full.statistics["gram"]["head"].dense())


def test_a_network_that_reads_packed_weights_itself() -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0 * self.attn.in_proj_weight.sum()

    with pytest.warns(UserWarning, match=r"averaged without statistics.*lstm \(LSTM\), attn \(Multihead"):
        upload = maecho.make_upload(Own(), data(), "ann", ["classes"])
    assert upload.stored == ()
    with pytest.raises(maecho.InputError, match=r"^ann: .*must take inputs .*Expected 4, got 9"):
        maecho.make_upload(Own(), [(torch.ones(2, 3, 9), torch.zeros(2))], "ann", ["classes"])


def test_the_model_is_as_it_was() -> None:
    model = net().train()
    before = copy.deepcopy(model.state_dict())
    enabled = torch.backends.mha.get_fastpath_enabled()
    maecho.make_upload(model, data(), "ann", ["gram", "fisher"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert isinstance(model.lstm, nn.LSTM)
    assert torch.backends.mha.get_fastpath_enabled() == enabled


def test_grams_of_an_attention_are_those_of_its_inputs() -> None:
    model = net().double().eval()
    upload = maecho.make_upload(model, [(x.double(), y) for x, y in data()], "ann", ["gram"], rank=None)
    x = torch.cat([x for x, _ in data()]).double()
    with torch.no_grad():
        h, _ = model.lstm(x)
        heads = []
        for part in range(2):
            q, k, v = (
                h @ W[2 * part : 2 * part + 2].T + b[2 * part : 2 * part + 2]
                for W, b in zip(model.attn.in_proj_weight.chunk(3), model.attn.in_proj_bias.chunk(3), strict=True)
            )
            heads.append((q @ k.mT / 2**0.5).softmax(-1) @ v)
    for name, inputs in {"q": h, "k": h, "v": h, "out": torch.cat(heads, -1)}.items():
        rows = torch.cat([inputs.reshape(-1, 4), torch.ones(36, 1)], 1)
        found = upload.statistics["gram"][f"attn.{name}"].dense()[0].double()
        torch.testing.assert_close(found, rows.T @ rows, rtol=1e-5, atol=1e-5)


def test_a_model_that_cannot_be_copied_is_averaged_and_named() -> None:
    class Stubborn(Net):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise TypeError("not this one")

    with pytest.warns(UserWarning, match=r"averaged without statistics.*lstm \(LSTM\), attn \(Multihead"):
        upload = maecho.make_upload(Stubborn(), data(), "ann", ["classes"])
    assert upload.weights.keys() == Net().state_dict().keys()
