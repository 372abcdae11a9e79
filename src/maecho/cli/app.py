"""The program `maecho`: its commands, its version, and how an error ends: in one sentence on stderr and exit code 2."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from maecho._version import __version__
from maecho.cli import (
    lab_commands,
    merging_commands,
    page_commands,
    relay_commands,
    rounds_commands,
    upload_commands,
    values,
)
from maecho.errors import one_line, printable

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": lab_commands.demo,
    "check": upload_commands.check_,
    "upload": upload_commands.upload,
    "inspect": upload_commands.inspect,
    "aggregate": merging_commands.aggregate_,
    "relay": relay_commands.relay_,
    "evaluate": merging_commands.evaluate_,
    "methods": merging_commands.methods,
    "rounds": rounds_commands.rounds,
    "reproduce": lab_commands.reproduce_,
    "report": page_commands.report,
}
"""Every command, in the order of `maecho --help`. What a command does stands in the docstring of its function."""

app = typer.Typer(
    help="One model out of many: one-shot federated learning without server-side training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

for name, command in COMMANDS.items():
    app.command(name)(command)


def main() -> None:
    """Run the command line. With MAECHO_DEBUG=1 an error shows its traceback."""
    warnings.showwarning = lambda message, *_: print(f"warning: {one_line(str(message))}", file=sys.stderr)
    try:
        try:
            app()
        finally:
            for folder in values.made_folders():
                print(f"note: made the folder {printable(str(folder))}", file=sys.stderr)
    except (ValueError, OSError, FloatingPointError, LinAlgError) as error:
        if os.environ.get("MAECHO_DEBUG"):
            raise
        unsolved = "the uploads hold numbers that are too large or too small to compute with: "
        why = unsolved if isinstance(error, LinAlgError) else ""
        print(f"error: {one_line(why + str(error))}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"maecho {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass
