"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Model = Annotated[
    str, typer.Option(help="The network, as package.module:factory; the factory returns a torch.nn.Module.")
]
Data = Annotated[
    str, typer.Option(help="The data, as package.module:factory; the factory returns (inputs, labels) batches.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
