"""Prints the content of an upload's file for people. Equal blocks of a network are one line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from maecho.cli import console
from maecho.formatting import columns, folded, names_of, size
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
    _show_tensors(inspection.entries(upload), every)
    averaged = inspection.averaged(upload)
    if averaged:
        console.say("Only averaged, without an input matrix: ", console.plain(names_of(averaged)))
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


def _show_tensors(entries: Sequence[Entry], every: bool) -> None:
    """Print the tensors, part by part. Those of equal blocks are one line, unless all are to be listed."""
    rows: list[tuple[str, ...]] = [("tensor", "", "shape", "dtype", "rank", "bytes")]
    for part, group in itertools.groupby(entries, lambda entry: entry.part):
        found = list(group)
        rows.append((part, "", "", "", "", ""))
        names = [(entry.name, at if every else _facts(entry)) for at, entry in enumerate(found)]
        rows += [_row(name, [found[at] for at in members]) for name, members in folded(names).items()]
    rows.append(("total", "", "", "", "", f"{sum(entry.bytes for entry in entries):,}"))
    for line in columns(rows, right=(1, 4, 5)).splitlines():
        console.say(console.plain(line, "" if line.startswith("  ") else "bold"), whole=True)


def _row(name: str, found: Sequence[Entry]) -> tuple[str, ...]:
    ranks = [entry.rank for entry in found if entry.rank is not None]
    return (
        f"  {name}",
        f"{len(found)} of" if len(found) > 1 else "",
        " x ".join(_span(axis) for axis in zip(*(entry.shape for entry in found), strict=True)) or "scalar",
        found[0].dtype,
        _span(ranks) if ranks else "",
        f"{sum(entry.bytes for entry in found):,}",
    )


def _facts(entry: Entry) -> tuple[object, ...]:
    """What is the same for the tensors of equal blocks: all but how many directions a cut has left."""
    return entry.dtype, entry.rank is None, entry.shape if entry.rank is None else entry.shape[:-1]


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
