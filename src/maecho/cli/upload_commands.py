"""The commands of a client: `upload` makes its file, and `inspect` shows what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from maecho.checking.check import check
from maecho.cli import console, factories, inspecting, values
from maecho.cli.options import Data, Force, Json, Model, Rank, Statistics, Weights
from maecho.errors import InputError
from maecho.privacy import Privacy
from maecho.statistics import Options
from maecho.upload.client import make_upload


def upload(
    model: Model,
    data: Data,
    client: Annotated[str, typer.Option(help="This client's name. No other client may have the same one.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    weights: Weights = None,
    statistics: Statistics = None,
    for_methods: Annotated[
        str | None,
        typer.Option(
            "--for", help="The methods that will merge, separated by commas: sends what these read and nothing else."
        ),
    ] = None,
    rank: Rank = "4x",
    labels: Annotated[
        values.Labels,
        typer.Option(help="Labels for fisher and gradients: the model's own, samples of these, or the data's."),
    ] = values.Labels.expected,
    seed: Annotated[int, typer.Option(help="Seed for --labels sampled.")] = 0,
    mean_of: Annotated[
        int | None,
        typer.Option(
            help="How many examples each mean behind the projector is over; the paper's release takes 64.",
            show_default="the smallest power of two that makes at most 128 means",
        ),
    ] = Options.mean_of,
    privacy_noise: Annotated[float | None, typer.Option(help="Noise multiplier, for differential privacy.")] = None,
    privacy_clip: Annotated[float | None, typer.Option(help="Norm to which inputs are clipped, with noise.")] = None,
    privacy_delta: Annotated[float, typer.Option(help="δ of the (ε, δ) in the file.")] = Privacy.delta,
    mode: Annotated[
        str, typer.Option(help="Who may read the file, as for chmod: 600 its owner, 640 also its group.")
    ] = "600",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make this client's upload file from its model and its data.

    Example: `maecho upload --model clinic:network --weights a.safetensors --data clinic:train --client clinic-a --out
    clinic-a.safetensors`
    """
    privacy = None
    if privacy_noise is not None and privacy_clip is not None:
        privacy = Privacy(privacy_noise, privacy_clip, delta=privacy_delta)
    elif privacy_noise is not None or privacy_clip is not None:
        raise InputError("--privacy-noise and --privacy-clip must be given together, got one of them")
    values.check_out(out, force, [*factories.sources(model, data), *([] if weights is None else [weights])])
    permissions = values.permissions(mode)
    made = make_upload(
        factories.model(model, weights),
        factories.batches(data),
        client,
        values.words(statistics),
        values.rank(rank),
        labels=labels.value,
        generator=torch.Generator().manual_seed(seed),
        mean_of=mean_of,
        for_methods=values.words(for_methods),
        privacy=privacy,
    )
    made.save(out, permissions)
    inspecting.show_upload(out, as_json)


def check_(
    model: Model,
    data: Data,
    weights: Weights = None,
    client: Annotated[str, typer.Option(help="This client's name.")] = "client",
    statistics: Statistics = None,
    rank: Rank = "4x",
    as_json: Json = False,
) -> None:
    """Look at a model and its first batch before any work: how layers are read, what an upload would lose, its size and
    time, which methods can be used, and what is wrong. Writes nothing. Ends with code 1 after an error.

    Example: `maecho check --model clinic:network --weights a.safetensors --data clinic:train`
    """
    # The batches are not looked at here: what is wrong with them is a finding.
    found = check(
        factories.model(model, weights),
        factories.call(data, "data"),
        client,
        values.words(statistics),
        values.rank(rank),
    )
    if as_json:
        console.print_json(found.as_dict())
    else:
        print(found)
    if not found.ok:
        raise typer.Exit(1)


def inspect(
    file: Annotated[Path, typer.Argument(help="An upload file.")],
    every: Annotated[
        bool, typer.Option("--all", help="List every tensor. By default equal blocks are one line.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what leaves a client: its tensors, their shapes, bytes and ranks, and in plain words what they can reveal.

    Example: `maecho inspect clinic-a.safetensors`
    """
    inspecting.show_upload(file, as_json, every)
