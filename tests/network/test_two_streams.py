"""Whisper, BART and T5: two streams, layers that both of them run, and one table for encoder, decoder and head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import maecho
from support.clients import rng
from support.contract import close

COMMON = {"vocab_size": 30, "d_model": 8, "eos_token_id": 2, "decoder_start_token_id": 0}
HALVES = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
T5 = {"d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "relative_attention_num_buckets": 4, "pad_token_id": 0}
WHISPER = {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 8}

MAKES: dict[str, Callable[[], nn.Module]] = {
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**COMMON, **HALVES, **WHISPER)
    ),
    "bart": lambda: transformers.BartForSequenceClassification(
        transformers.BartConfig(**COMMON, **HALVES, max_position_embeddings=10, num_labels=3)
    ),
    "t5": lambda: transformers.T5ForSequenceClassification(transformers.T5Config(**COMMON, **T5, num_labels=3)),
    "t5 with a tied head": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**COMMON, **T5)),
}
POSITIONS = {
    "whisper": {"model.decoder.embed_positions"},
    "bart": {"model.encoder.embed_positions", "model.decoder.embed_positions"},
}
"""What is averaged, and named: tables that are read at the places of tokens and not at tokens."""


def made(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MAKES[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def words(n: int, width: int, seed: int) -> Tensor:
    x = torch.randint(3, 30, (n, width), generator=rng(seed))
    x[:, -1] = 2
    return x


def data(name: str, seed: int = 0, n: int = 12) -> list[dict[str, Tensor]]:
    found = []
    for k in (seed, seed + 50):
        x = {"input_ids": words(n, 6, k)}
        if name == "whisper":
            x = {"input_features": torch.randn(n, 4, 12, generator=rng(k))}
        if name in ("whisper", "t5 with a tied head"):
            x["decoder_input_ids"] = words(n, 4, k + 1)
        found.append({**x, "labels": torch.arange(n) % 3})
    return found


def last(output: Any) -> Tensor:
    """The scores: those of the class, or of the last word."""
    return output.logits if output.logits.dim() == 2 else output.logits[:, -1]


def scores(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([last(model(**{k: v for k, v in one.items() if k != "labels"})) for one in batches])


def upload(name: str, model: nn.Module, seed: int) -> maecho.Upload:
    return maecho.make_upload(
        model, data(name, seed), f"{seed}", ["gram", "projector", "classes", "fisher"], rank=None, outputs=last
    )


pytestmark = pytest.mark.filterwarnings("ignore:.*these are averaged")


@cache
def twins(name: str) -> tuple[maecho.Upload, maecho.Upload]:
    return upload(name, made(name), 0), upload(name, made(name), 1)


@pytest.mark.parametrize("name", MAKES)
def test_every_use_of_a_layer_counts_once(name: str) -> None:
    """The sums of the layers, from hooks of our own."""
    model, sums = made(name), defaultdict(lambda: torch.zeros(0))
    calls: dict[tuple[int, bool], int] = defaultdict(int)

    def add(module: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        x, table = (args or tuple(kwargs.values()))[0], isinstance(module, nn.Embedding)
        key = module.weight.data_ptr(), table
        if table:
            found = x.reshape(-1).bincount(minlength=len(module.weight)).double().diag()
        else:
            rows = x.reshape(-1, x.shape[-1]).double()
            rows = rows if module.bias is None else torch.cat([rows, torch.ones(len(rows), 1)], 1)
            found = rows.T @ rows
        sums[key] = found if key not in sums else sums[key] + found
        calls[key] += 1

    own = twins(name)[0]
    hooks = [
        module.register_forward_pre_hook(add, with_kwargs=True)
        for module in model.modules()
        if type(module) is nn.Linear or isinstance(module, nn.Embedding)
        if not type(module).__name__.endswith("PositionalEmbedding")
    ]
    scores(model, data(name))
    for hook in hooks:
        hook.remove()
    state, checked = model.state_dict(keep_vars=True), 0
    for layer in own.layers:
        key = state[layer.weight].data_ptr(), layer.one_hot
        if key in sums:
            gram = own.statistics["gram"][layer.name]
            dense = gram.values[0].diag() if layer.one_hot else gram.dense()[0]
            torch.testing.assert_close(dense.double(), sums[key], rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked >= len(own.layers) - 2, "all but Whisper's convolutions"
    shared = {"bart": "model.shared.weight", "t5": "transformer.shared.weight", "t5 with a tied head": "shared.weight"}
    if name in shared:
        assert calls[state[shared[name]].data_ptr(), True] == 4, "by both streams in both batches"


@pytest.mark.parametrize("name", MAKES)
def test_what_is_only_averaged_is_named(name: str) -> None:
    unknown = {text.split(" ")[0] for text in twins(name)[0].recipe["unknown"]}
    assert {text for text in unknown if "layer_norm" not in text} == POSITIONS.get(name, set())
    assert all("layer_norm" not in text or name.startswith("t5") for text in unknown)
    merged = maecho.aggregate(twins(name), "regmean")
    of_layers = {layer.weight for layer in twins(name)[0].layers}
    assert not of_layers & set(merged.averaged)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("method", ["fedavg", "regmean", "ma-echo", "fisher"])
def test_alone_and_twins_come_back(name: str, method: str) -> None:
    for uploads in (twins(name)[:1], twins(name)):
        merged = maecho.aggregate(uploads, method)
        close(dict(merged), {key: made(name).state_dict()[key] for key in merged}, 1e-4)


@pytest.mark.parametrize("name", MAKES)
def test_a_relay_gives_alone_and_twins_back(name: str) -> None:
    model = made(name)
    for seeds in ((0,), (0, 1)):
        merged = maecho.relay(made(name, 5), [(model, data(name, seed)) for seed in seeds], outputs=last)
        other = made(name, 6)
        other.load_state_dict(dict(merged))
        torch.testing.assert_close(scores(other, data(name)), scores(model, data(name)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(("method", "why"), [
    ("ot", "matching needs the neuron spaces of the architecture, got none"),
    ("ma-echo+ot", "matching needs the neuron spaces of the architecture, got none"),
    ("echo-chain", "echo-chain needs the statistic 'moments', got an upload with"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_sentence(name: str, method: str, why: str) -> None:
    options = {"model": made(name, 5)} if method == "echo-chain" else {}
    with pytest.raises(maecho.UploadError, match=why) as caught:
        maecho.aggregate(twins(name), method, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MAKES)
def test_two_clients_are_relayed_to_less_than_the_error_of_their_average(name: str) -> None:
    """The error of every client's scores on its own data, summed over the clients and three pairs of them. One pair
    alone is a matter of luck, since the networks are not trained."""
    errors = {"average": 0.0, "relay": 0.0}
    for pair in (3, 4, 5):
        models = [made(name, 0), made(name, 0)]
        with torch.no_grad():
            for parameter in models[1].parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng(pair)))
        pairs = [(model, data(name, seed, 20)) for seed, model in enumerate(models)]
        plain = maecho.aggregate([upload(name, model, k) for k, model in enumerate(models)], "fedavg")
        relayed = maecho.relay(
            made(name, 5), pairs, outputs=last, regression=maecho.echo.fit.Regression(head="regression", pull=0)
        )
        for how, state in (("average", plain), ("relay", relayed)):
            merged = made(name, 6)
            merged.load_state_dict(dict(state))
            errors[how] += sum(float((scores(merged, d) - scores(model, d)).square().sum()) for model, d in pairs)
    assert errors["relay"] < errors["average"]
