"""The commands of a client: `upload` makes its file, and `inspect` shows what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from maecho.cli import console, factories, values
from maecho.cli.options import Data, Force, Json, Model
from maecho.errors import InputError
from maecho.privacy import Privacy
from maecho.statistics import STATISTICS, Options
from maecho.upload.client import make_upload

DEFAULT = [name for name, statistic in STATISTICS.items() if statistic.by_default]
PRIVATE = [name for name, statistic in STATISTICS.items() if statistic.private]


def upload(
    model: Model,
    data: Data,
    client: Annotated[str, typer.Option(help="This client's name. No other client may have the same one.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    weights: Annotated[
        Path | None,
        typer.Option(help="Trained weights (safetensors). Without them the factory must return a trained model."),
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            help=f"Statistics to send, separated by commas, from {', '.join(STATISTICS)}. By default "
            f"{','.join(DEFAULT)}; with privacy {','.join(PRIVATE)}."
        ),
    ] = None,
    for_methods: Annotated[
        str | None,
        typer.Option(
            "--for", help="The methods that will merge, separated by commas: sends what these read and nothing else."
        ),
    ] = None,
    rank: Annotated[
        str,
        typer.Option(
            help='How far to cut statistics: a rank (64), one for each layer ({"fc1": 64}), a share of energy (0.999), '
            'a size (3x, "5 MB"), or all.'
        ),
    ] = "4x",
    labels: Annotated[
        values.Labels,
        typer.Option(help="Labels for fisher and gradients: the model's own, samples of these, or the data's."),
    ] = values.Labels.expected,
    seed: Annotated[int, typer.Option(help="Seed for --labels sampled.")] = 0,
    mean_of: Annotated[
        int,
        typer.Option(help="How many examples each mean behind the projector is over; the paper's release takes 64."),
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
    console.show_upload(out, as_json)


def inspect(file: Annotated[Path, typer.Argument(help="An upload file.")], as_json: Json = False) -> None:
    """Show what leaves a client: every tensor, its shape, bytes and rank, and in plain words what it can reveal.

    Example: `maecho inspect clinic-a.safetensors`
    """
    console.show_upload(file, as_json)
