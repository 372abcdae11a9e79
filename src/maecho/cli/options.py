"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maecho.statistics import STATISTICS

DEFAULT = [name for name, statistic in STATISTICS.items() if statistic.by_default]
PRIVATE = [name for name, statistic in STATISTICS.items() if statistic.private]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Model = Annotated[
    str, typer.Option(help="The network, as package.module:factory; the factory returns a torch.nn.Module.")
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="Trained weights: safetensors, or a state_dict by torch.save. Without them the factory must return a "
        "trained model."
    ),
]
Statistics = Annotated[
    str | None,
    typer.Option(
        help=f"Statistics to send, separated by commas, from {', '.join(STATISTICS)}. By default "
        f"{','.join(DEFAULT)}; with privacy {','.join(PRIVATE)}."
    ),
]
Rank = Annotated[
    str,
    typer.Option(
        help='How far to cut statistics: a rank (64), one for each layer ({"fc1": 64}), a share of energy (0.999), '
        'a size (3x, "5 MB"), or all.'
    ),
]
Data = Annotated[
    str, typer.Option(help="The data, as package.module:factory; the factory returns (inputs, labels) batches.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
