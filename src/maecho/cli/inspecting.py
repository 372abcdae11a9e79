"""Prints the content of an upload's file for people, with `rich`. Equal blocks of a network are one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from maecho.cli import console
from maecho.formatting import folded, size
from maecho.upload import inspection
from maecho.upload.header import not_sent
from maecho.upload.inspection import Entry
from maecho.upload.upload import read


def show_upload(path: Path, as_json: bool, every: bool = False) -> None:
    """Print the content of an upload's file, who made it, and what it can reveal."""
    (upload, header), total = read(path), path.stat().st_size
    if as_json:
        console.print_json(
            {
                "file": str(path),
                "bytes": total,
                **{key: getattr(header, key) for key in ("client", "examples", "fingerprint", "recipe")},
                "statistics": sorted(header.statistics),
                "made_by": header.made_by,
                "tensors": [asdict(entry) for entry in inspection.entries(upload)],
                "averaged": inspection.averaged(upload),
                "reveals": inspection.reveals(upload),
                "warnings": inspection.warnings(upload),
            }
        )
        return
    console.say(
        console.plain(path, "bold"),
        ": upload of ",
        console.plain(upload.client, "bold"),
        f", {upload.examples:,} examples, {size(total)}, architecture {upload.fingerprint}, ",
        console.plain(header.made_by),
    )
    console.out.print(_tensors(inspection.entries(upload), every))
    averaged = inspection.averaged(upload)
    if averaged:
        console.say("Only averaged, without an input matrix: ", console.plain(", ".join(averaged)))
    for what, why in not_sent(upload.recipe).items():
        console.say("Not sent: ", console.plain(what), ", since ", console.plain(why))
    promised = inspection.privacy(upload)
    if promised is not None:
        console.say("\n", ("Privacy", "bold"), ", as the client says: ", console.plain(promised), ".")
    console.say(("\nWhat it can reveal", "bold"))
    for part, words in inspection.reveals(upload).items():
        console.say("  ", (part, "bold"), f": {words}")
    for warning in inspection.warnings(upload):
        console.say("  ", ("Warning:", "bold yellow"), " ", console.plain(warning), ".")


def _tensors(entries: Sequence[Entry], every: bool) -> Table:
    """The tensors as a table. Those of equal blocks are one line, unless all are to be listed."""
    table = Table()
    for column in ("part", "tensor", "shape", "dtype", "rank", "bytes"):
        table.add_column(
            column,
            justify="right" if column in ("rank", "bytes") else "left",
            overflow="fold",
            no_wrap=column == "bytes",
        )
    names = [f"{entry.part}/{entry.name}" for entry in entries]
    groups = [(name, [at]) for at, name in enumerate(names)]
    if not every:
        groups = [*folded((name, _facts(entry)) for name, entry in zip(names, entries, strict=True)).items()]
    for name, members in groups:
        found = [entries[at] for at in members]
        part, _, tensor = name.partition("/")
        ranks = sorted({entry.rank for entry in found if entry.rank is not None})
        sizes = zip(*(entry.shape for entry in found), strict=True)
        table.add_row(
            part,
            console.plain(tensor + (f" ({len(found)} alike)" if len(found) > 1 else "")),
            " x ".join(_span(axis) for axis in sizes) or "scalar",
            found[0].dtype,
            _span(ranks) if ranks else "",
            f"{sum(entry.bytes for entry in found):,}",
        )
    table.add_section()
    table.add_row("total", "", "", "", "", f"{sum(entry.bytes for entry in entries):,}")
    return table


def _facts(entry: Entry) -> tuple[object, ...]:
    """What is the same for the tensors of equal blocks: all but how many directions a cut has left."""
    return entry.dtype, entry.rank is None, entry.shape if entry.rank is None else entry.shape[:-1]


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
