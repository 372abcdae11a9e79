"""A relay goes on from earlier uploads or from a model that was merged before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import maecho
from maecho import relay
from maecho.echo.simulated import Drawing
from support.clients import batches, rng
from support.clients import network as mlp
from support.relays import (
    images,
    random_network,
    resnet,
    same,
)
from support.tiny import refused_input


def test_uploads_of_before_are_gone_on_from() -> None:
    model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
    sent = [
        maecho.make_upload(m, b, f"client {i}", ["moments", "features"], rank=None) for i, (m, b) in enumerate(pairs)
    ]
    whole = relay(model, pairs, rounds=2)
    same(relay(model, pairs, rounds=2, uploads=sent), whole)
    assert whole.recipe["upload_bytes"] == max(upload.bytes() for upload in sent)
    small = [maecho.make_upload(m, b, f"client {i}", rank=2) for i, (m, b) in enumerate(pairs)]
    assert relay(model, pairs, rounds=2, uploads=small).recipe["upload_bytes"] < whole.recipe["upload_bytes"]
    assert relay(model, pairs).recipe["upload_bytes"] == 0
    with refused_input("uploads must be Upload objects, got str"):
        relay(model, pairs, rounds=2, uploads=["a.safetensors"])  # type: ignore[list-item]


@pytest.mark.parametrize("rounds", [2, 3, ["2"], ["2", "4"]])
def test_a_model_merged_before_is_gone_on_from(rounds: Any) -> None:
    """Stages that echo-chain has fitted are not drawn for again, and the result is the same."""
    model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
    sent = [maecho.make_upload(m, b, f"client {i}", rank=None) for i, (m, b) in enumerate(pairs)]
    options: dict[str, Any] = {"rounds": rounds, "uploads": sent, "drawing": Drawing(300)}
    chain = maecho.aggregate(sent, "echo-chain", model=model, draws=300)
    found, whole = relay(model, pairs, start=chain, **options), relay(model, pairs, **options)
    same(found, whole)
    stages_from_start = {2: 2, 3: 1}[rounds] if isinstance(rounds, int) else 1
    ours, theirs = found.recipe["rounds"], whole.recipe["rounds"]
    assert [stage["inputs"] == "start" for stage in ours] == [k < stages_from_start for k in range(3)]
    assert not any(stage["inputs"] == "start" for stage in theirs)
    for key in ("layers", "clients", "bytes"):
        assert [stage[key] for stage in ours] == [stage[key] for stage in theirs]
    # Where the data are asked, the start does not matter; before that nothing else does.
    other = relay(model, pairs, start=chain | {"0.weight": 2 * chain["0.weight"]}, **options)
    assert torch.equal(other["0.weight"], 2 * chain["0.weight"])
    spoilt = relay(model, pairs, start=chain | {"4.weight": 0 * chain["4.weight"]}, **options)
    same(spoilt, whole)
    everything = relay(model, pairs, start=chain, **{**options, "rounds": 99})
    same(everything, relay(model, pairs, **{**options, "rounds": 99}))


def test_norms_and_what_has_no_matrix_come_from_the_start_too() -> None:
    pairs = [(random_network(resnet, i), images(i)) for i in range(2)]
    sent = [maecho.make_upload(m, b, f"client {i}", rank=None) for i, (m, b) in enumerate(pairs)]
    options: dict[str, Any] = {"rounds": ["one"], "uploads": sent, "drawing": Drawing(300)}
    chain = maecho.aggregate(sent, "echo-chain", model=resnet(), draws=300)
    same(relay(resnet(), pairs, start=chain, **options), relay(resnet(), pairs, **options))


def test_starts_that_are_none() -> None:
    model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
    sent = [maecho.make_upload(m, b, f"client {i}", rank=2) for i, (m, b) in enumerate(pairs)]
    with refused_input("start must come with uploads", "rounds at some layers alone, got rounds='all'"):
        relay(model, pairs, uploads=sent, start=model.state_dict())
    with refused_input("with a start some stage must be asked for anew, got rounds=1"):
        relay(model, pairs, rounds=1, uploads=sent, start=model.state_dict())
    with refused_input("start must be a state_dict of the model", "got"):
        relay(model, pairs, rounds=2, uploads=sent, start={"0.weight": torch.zeros(1)})


def test_clients_and_uploads_must_belong_together_and_be_of_use() -> None:
    model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
    sent = [maecho.make_upload(m, b, f"client {i}", rank=2) for i, (m, b) in enumerate(pairs)]
    with refused_input(
        "rounds=1 asks no client once there are uploads", "aggregate(uploads, 'echo-chain'", "2 clients"
    ):
        relay(model, pairs, rounds=1, uploads=sent)
    for few in (sent[:1], [*sent, sent[0]], []):
        with refused_input(f"uploads must be one of each of the 2 clients, in any order, got {len(few)}"):
            relay(model, pairs, rounds=2, uploads=few)
    options: dict[str, Any] = {"rounds": 2, "drawing": Drawing(300)}
    same(relay(model, pairs, uploads=sent[::-1], **options), relay(model, pairs, uploads=sent, **options), 1e-6)


def test_with_privacy_uploads_of_before_must_promise_it_too() -> None:
    pairs, privacy = [(mlp(seed), batches(seed)) for seed in (1, 2)], maecho.Privacy(2.0, 3.0, generator=rng())
    plain = [maecho.make_upload(m, b, f"{i}") for i, (m, b) in enumerate(pairs)]
    with refused_input("0: with privacy an upload must be made with noise=2.0 and delta=1e-05, got noise=None"):
        relay(mlp(), pairs, rounds=2, uploads=plain, privacy=privacy)
    other = maecho.Privacy(2.0, 9.0, generator=rng(1))
    noisy = [maecho.make_upload(m, b, f"{i}", privacy=other) for i, (m, b) in enumerate(pairs)]
    merged = relay(mlp(), pairs, rounds=2, uploads=noisy, privacy=privacy)
    assert merged.recipe["privacy"]["releases"] == 2
