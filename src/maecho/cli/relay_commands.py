"""The command `relay`: echo-relay with all clients in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from maecho.cli import console, factories, values
from maecho.cli.options import Force, Json, Model
from maecho.echo.fit import Regression
from maecho.echo.relay import relay
from maecho.echo.rounds import Rounds
from maecho.errors import InputError

OPTIONS = {f.name: f.default for f in dataclasses.fields(Regression) if f.repr}


def relay_(
    model: Model,
    out: Annotated[Path, typer.Option(help="The merged model to write (safetensors).")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A client's data, as package.module:factory. Once for each client, in the order of --weights."
        ),
    ] = None,
    weights: Annotated[
        list[Path] | None, typer.Option(help="A client's trained weights: safetensors, an upload or torch.save's file.")
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(help="In place of --data and --weights: a factory of pairs (trained model, batches)."),
    ] = None,
    rounds: Annotated[
        str, typer.Option(help="all: ask at every layer. A number: the last ones alone. Or names, by commas.")
    ] = "all",
    minimum: Annotated[
        int | None, typer.Option(help="So many examples of a client must carry every number that it sends.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help=f"An option of the fit, as name=value: {', '.join(OPTIONS)}."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Merge the models of clients whose data are all at hand by echo-relay, a round for each layer.

    Example: `maecho relay --model clinic:network --weights a.safetensors --data clinic:a --weights b.safetensors --data
    clinic:b --out merged.safetensors`
    """
    names = data or []
    given = bool(names or weights)
    if given == (clients is not None) or (given and len(names) != len(weights or ())):
        raise InputError(
            f"--data and --weights must be given once for each client, or --clients alone, got {len(names)} --data, "
            f"{len(weights or ())} --weights and {'a' if clients is not None else 'no'} --clients"
        )
    values.check_out(out, force, [*factories.sources(model, clients, *names), *(weights or ())])
    network = factories.model(model)
    regression = Regression(**_changed(options or []))
    pairs: Sequence[tuple[nn.Module, Iterable[Any]]]
    if clients is not None:
        pairs = factories.clients(clients)
    else:
        pairs = [
            (factories.model(model, path), factories.batches(name))
            for path, name in zip(weights or (), names, strict=True)
        ]
    merged = relay(network, pairs, rounds=_rounds(rounds), regression=regression, minimum=minimum)
    merged.save(out)
    if as_json:
        console.print_json({"out": str(out), "averaged": merged.averaged, "recipe": merged.recipe})
    else:
        console.show_merged(merged, out)


def _rounds(text: str) -> Rounds:
    """Where real data are asked: "all", a number, or names of layers."""
    if text == "all":
        return "all"
    return int(text) if text.isdecimal() else values.words(text) or []


def _changed(texts: Iterable[str]) -> dict[str, Any]:
    """Options of the fit, of the form name=value."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set must be name=value, got {text!r}")
        if name not in OPTIONS:
            raise InputError(f"relay has the options {', '.join(OPTIONS)}, got {name!r}")
        found[name] = values.parsed(value)
    return found
