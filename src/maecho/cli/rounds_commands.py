"""The command `rounds`: several servers of many rounds, side by side on the same clients."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from maecho.cli import console, factories, values
from maecho.cli.options import Force, Json
from maecho.errors import InputError
from maecho.formatting import size
from maecho.progress import stderr
from maecho.rounds import LOSSES, History, Local, RoundRecord, Rounds, Sphere
from maecho.rounds.choices import SERVERS, find_server
from maecho.rounds.engine import Client
from maecho.upload.merged import Merged, make_recipe

DEFAULTS = ("fedavg", "ma-echo", "regmean", "echo-relay")
LEVELS = (0.8, 0.9)


def rounds(
    server: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A server, with options after a colon (echo-relay:pace=0.5). May be given again. One of "
            f"{', '.join(SERVERS)}."
        ),
    ] = None,
    count: Annotated[int, typer.Option("--rounds", help="Number of rounds.")] = 15,
    sampled: Annotated[int, typer.Option(help="Clients in a round.")] = 8,
    clients: Annotated[int, typer.Option(help="Clients that share the embedded digits.")] = 40,
    classes: Annotated[int, typer.Option(help="Classes of each client of the embedded digits.")] = 2,
    loss: Annotated[
        str | None,
        typer.Option(
            help=f"Loss of local training: {', '.join(LOSSES)}. By default own-classes; cross-entropy if "
            "clients have one class each."
        ),
    ] = None,
    clip: Annotated[float, typer.Option(help="Largest norm of a local gradient; 0: any.")] = 1.0,
    fixed_head: Annotated[
        bool,
        typer.Option(help="Keep the last layer fixed while clients train; solve for it after every round."),
    ] = False,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 10,
    learning_rate: Annotated[float, typer.Option(help="Of local SGD.")] = 0.05,
    batch_size: Annotated[int, typer.Option(help="Of local SGD.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the split, the weights, the samples and the training.")] = 0,
    model: Annotated[str | None, typer.Option(help="Your network, as package.module:factory.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Your clients, as package.module:factory; the factory returns for each client a pair of tensors "
            "(inputs, labels), or a list of batches of such pairs."
        ),
    ] = None,
    test: Annotated[str | None, typer.Option(help="Your test data, as package.module:factory.")] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder that keeps every run after each round. A run that was stopped goes on.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The last global model to write, with a single --server.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run many rounds of training and merging in one process, and compare servers. By default on scikit-learn's digits.

    Example: `maecho rounds --server fedavg --server echo-relay:pace=0.5 --rounds 20`
    """
    chosen = {name: _server(name) for name in server or DEFAULTS}
    given = {"--model": model, "--data": data, "--test": test}
    if any(given.values()) and not all(given.values()):
        missing = ", ".join(option for option, value in given.items() if value is None)
        raise InputError(f"--model, --data and --test must be given together, got none for {missing}")
    if out is not None:
        values.check_out(out, force, factories.sources(model, data, test))
        if len(chosen) != 1:
            raise InputError(f"--out must come with a single --server, got {len(chosen)}")
    if loss is not None and loss not in LOSSES:
        raise InputError(f"--loss must be one of {', '.join(LOSSES)}, got {loss!r}")
    if checkpoints is not None and checkpoints.exists() and not checkpoints.is_dir():
        raise InputError(f"--checkpoints must be a folder, got a file at {checkpoints}")
    if checkpoints is not None:
        values.check_folder(checkpoints, "--checkpoints")
    if model is None:
        torch.set_num_threads(1)  # networks of this size gain nothing from threads
    network, parts, measured = _own(model, data, test) if model and data and test else _digits(clients, classes, seed)
    if loss is None:
        loss = "cross-entropy" if all(len(y.unique()) == 1 for _, y in parts) else "own-classes"
    sphere = Sphere() if fixed_head else None
    local = Local(epochs, learning_rate, 0.5, batch_size, clip or None, LOSSES[loss], sphere)
    runs = {name: Rounds(count, sampled, one, local, seed) for name, one in chosen.items()}
    found: dict[str, History] = {}
    shown = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    with Progress(*shown, console=stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
        for name, run in runs.items():
            task = bar.add_task(name, total=count)

            def on_round(record: RoundRecord, task: Any = task, name: str = name) -> None:
                bar.update(task, completed=record.number, description=f"{name}: {100 * record.accuracy:.1f} %")

            path = None if checkpoints is None else _place(checkpoints, name)
            found[name] = run(network, parts, measured, path, on_round)
            for record in found[name].records:
                for client, why in record.left_out.items():
                    stderr().print(console.plain(f"{name}: round {record.number} is without client {client}: {why}"))
    if out is not None:
        ((name, history),) = found.items()
        seconds = sum(record.seconds for record in history.records)
        recipe = make_recipe(name, repr(runs[name]), sampled, seconds)
        Merged(history.weights, recipe=recipe).save(out)
    if as_json:
        console.print_json({name: _facts(history) for name, history in found.items()})
    else:
        _show(found, out)


def _server(text: str) -> Any:
    """A server by its name and, after a colon, its options."""
    name, _, options = text.partition(":")
    if name not in SERVERS:
        raise InputError(f"--server must be one of {', '.join(SERVERS)}, got {name!r}")
    given: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"--server: options must be name=value, got {part!r} in {text!r}")
        given[key.strip()] = values.parsed(value.strip())
    return find_server(name, given)


def _digits(clients: int, classes: int, seed: int) -> tuple[nn.Module, list[Client], Client]:
    from maecho.lab.demo_rounds import digits

    return digits(clients, classes, seed)


def _own(model: str, data: str, test: str) -> tuple[nn.Module, list[Client], Client]:
    found = factories.call(data, "data")
    if isinstance(found, (str, Tensor)) or not isinstance(found, Iterable):
        raise InputError(f"data: {data} must return one entry for each client, got {type(found).__name__}")
    parts = [_tensors(one, f"data: client {i}") for i, one in enumerate(found)]
    return factories.model(model), parts, _tensors(factories.call(test, "test"), "test")


def _tensors(given: Any, what: str) -> Client:
    """A pair of tensors, or batches of such pairs, as one pair."""
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    if pair and isinstance(given[0], Tensor) and isinstance(given[1], Tensor):
        return given[0], given[1]
    if isinstance(given, (str, Tensor)) or not isinstance(given, Iterable):
        raise InputError(f"{what} must be inputs and labels, or batches of them, got {type(given).__name__}")
    batches = list(given)
    for batch in batches:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)):
            raise InputError(f"{what} must have batches of two tensors, inputs and labels, got {type(batch).__name__}")
    if not batches:
        raise InputError(f"{what} must have at least one example, got none")
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def _place(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kept = "".join(c if c.isalnum() or c in "-." else "_" for c in name)
    return folder / f"{kept}.safetensors"


def _facts(history: History) -> dict[str, Any]:
    return {
        "accuracy": [round(a, 6) for a in history.accuracies],
        "rounds_to": {f"{level:g}": history.rounds_to(level) for level in LEVELS},
        "bytes_to": {f"{level:g}": history.bytes_to(level) for level in LEVELS},
        "seconds": round(sum(r.seconds for r in history.records), 3),
        "left_out": {r.number: dict(r.left_out) for r in history.records if r.left_out},
    }


def _show(found: dict[str, History], out: Path | None) -> None:
    table = Table(title="Accuracy of the global model", title_justify="left")
    table.add_column("server", min_width=min(24, max(map(len, found))), overflow="fold")
    heads = ("last", "mean of last 5", *(f"rounds to {100 * level:g} %" for level in LEVELS))
    for head in (*heads, "upload a round", "seconds"):
        table.add_column(head, justify="right")
    for name, history in found.items():
        last = len(history.records)
        reached = (history.rounds_to(level) for level in LEVELS)
        accuracies = [f"{100 * a:.1f} %" for a in (history.accuracies[-1], history.mean(max(1, last - 4), last))]
        sent, seconds = max(r.bytes for r in history.records), sum(r.seconds for r in history.records)
        rounds_to = ["never" if k is None else str(k) for k in reached]
        table.add_row(console.plain(name), *accuracies, *rounds_to, size(sent), f"{seconds:.1f}")
    console.out.print(table)
    if out is not None:
        console.say("The last global model: ", console.plain(out, "bold"), whole=True)
