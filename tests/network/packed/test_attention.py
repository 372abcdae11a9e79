"""Attention split into four parts computes what torch's packed attention does, and is packed again under its names."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho.network.attention import slow_path
from maecho.network.packed.attention import SplitAttention
from maecho.network.packed.twin import twin_of
from support.clients import rng
from support.tiny import refused_input

BOOL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
FLOAT = torch.randn(5, 5, generator=rng(3))
PADDING = torch.zeros(3, 5, dtype=torch.bool)
PADDING[1, 3:] = True


def attention(seed: int = 0, **options: Any) -> nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = nn.MultiheadAttention(8, 2, **options).eval()
        for name, p in made.named_parameters():
            if "bias" in name:
                nn.init.normal_(p)  # torch starts them at 0, where nothing could be mixed up
    return made


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": BOOL},
        {"attn_mask": FLOAT},
        {"attn_mask": torch.stack([BOOL] * 3 + [BOOL.T] * 3)},
        {"attn_mask": torch.randn(6, 5, 5, generator=rng(4))},
        {"key_padding_mask": PADDING},
        {"key_padding_mask": torch.randn(3, 5, generator=rng(5)), "attn_mask": FLOAT, "average_attn_weights": False},
        {"key_padding_mask": PADDING, "attn_mask": BOOL, "need_weights": False},
        {"attn_mask": BOOL, "is_causal": True, "need_weights": False},
    ],
    ids=lambda call: " ".join(f"{k}{v.dim() if isinstance(v, Tensor) else ''}" for k, v in call.items()) or "plain",
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_it_is_torch_attention_whatever_the_masks(batch_first: bool, call: dict[str, Any]) -> None:
    module = attention(batch_first=batch_first)
    q, k, v = torch.randn(3, 3, 5, 8, generator=rng(1))
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    same(SplitAttention(module)(q, k, v, **call), module(q, k, v, **call))


@pytest.mark.parametrize("options", [{"kdim": 6, "vdim": 7}, {"bias": False}, {"kdim": 6, "vdim": 7, "bias": False}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_widths_of_their_own_and_no_bias(batch_first: bool, options: dict[str, Any]) -> None:
    module = attention(batch_first=batch_first, **options)
    q = torch.randn(4, 3, 8, generator=rng(1))
    k = torch.randn(4 if batch_first else 6, 6 if batch_first else 3, module.kdim, generator=rng(2))
    v = torch.randn(*k.shape[:2], module.vdim, generator=rng(3))
    same(SplitAttention(module)(q, k, v), module(q, k, v))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_one_sequence_without_a_batch(batch_first: bool, average: bool) -> None:
    module = attention(batch_first=batch_first)
    x = torch.randn(5, 8, generator=rng(1))
    for masks in (
        {},
        {"key_padding_mask": PADDING[1]},
        {"attn_mask": BOOL},
        {"attn_mask": torch.stack([BOOL, BOOL.T])},
    ):
        call: dict[str, Any] = {**masks, "average_attn_weights": average}
        same(SplitAttention(module)(x, x, x, **call), module(x, x, x, **call))


class Twice(nn.Module):
    """A network with one attention under two names, another that cannot be split, and a third in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.one = attention(1, batch_first=True)
        self.two = self.one
        self.odd = attention(2, batch_first=True, add_zero_attn=True)
        self.more = nn.ModuleList([attention(3, batch_first=True, kdim=8, vdim=8, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.one, self.two, self.odd, self.more[0]):
            x = module(x, x, x)[0]
        return x


def block(**options: Any) -> dict[str, Any]:
    return {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "batch_first": True, **options}


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**block()), 2)


MODELS = {
    "alone": lambda: attention(batch_first=True),
    "layer": lambda: nn.TransformerEncoderLayer(**block(norm_first=True)),
    "encoder": encoder,
    "twice": Twice,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_split_network_is_the_same_function_and_goes_back(make: Any) -> None:
    model = make().eval()
    pair, x = twin_of(model), torch.randn(3, 5, 8, generator=rng(1))
    twin = pair.network
    args = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    with torch.no_grad():
        before = model(*args)  # by torch's fused path, where it has one
        with slow_path():
            same(twin(*args), before)
    state = pair.packed(twin.state_dict())
    assert list(state) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name
        assert state[name].dtype == tensor.dtype
    assert not any(isinstance(m, nn.MultiheadAttention) and not m.add_zero_attn for m in twin.modules())


def test_encoder_with_padding_and_decoder_with_memory() -> None:
    x, memory = torch.randn(2, 3, 5, 8, generator=rng(1))
    coder = encoder().eval()
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**block()), 1).eval()
    with torch.no_grad(), slow_path():
        same(
            twin_of(coder).network(x, mask=BOOL, src_key_padding_mask=PADDING),
            coder(x, mask=BOOL, src_key_padding_mask=PADDING),
        )
        masks = {"tgt_mask": BOOL, "memory_key_padding_mask": PADDING}
        same(twin_of(decoder).network(x, memory, **masks), decoder(x, memory, **masks))
    pair = twin_of(decoder)
    state = pair.packed(pair.network.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in decoder.state_dict().items())


def test_what_is_one_module_stays_one() -> None:
    twin = twin_of(Twice()).network
    assert twin.one is twin.two
    assert isinstance(twin.one, SplitAttention)
    assert isinstance(twin.more[0], SplitAttention)
    assert isinstance(twin.odd, nn.MultiheadAttention)


def test_nothing_else_changes() -> None:
    model = Twice().train()
    before, state = {k: t.clone() for k, t in model.state_dict().items()}, torch.get_rng_state()
    enabled = torch.backends.mha.get_fastpath_enabled()
    twin = twin_of(model).network
    for p in twin.parameters():
        p.data.zero_()
    with contextlib.suppress(ZeroDivisionError), slow_path():
        assert not torch.backends.mha.get_fastpath_enabled()
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    assert model.training
    assert not any(module.training for module in twin.modules())
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    module = attention().to(dtype)
    twin = SplitAttention(module)
    assert {p.dtype for p in twin.parameters()} == {dtype}
    x = torch.randn(5, 3, 8, generator=rng(1)).to(dtype)
    assert twin(x, x, x, attn_mask=BOOL)[0].dtype == dtype


def test_a_model_that_cannot_be_copied() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise TypeError("not\nthis one")

    with refused_input("the model", "copy.deepcopy", "Stubborn: not this one"):
        twin_of(Stubborn(2, 2))
