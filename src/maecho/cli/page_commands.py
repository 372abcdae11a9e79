"""The command `report`: a page of results, and its pictures as files."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from maecho import disk
from maecho.cli import console, values
from maecho.cli.options import Force
from maecho.errors import InputError
from maecho.lab.harness.results import results_folder
from maecho.lab.report.drawing.figures import svg_file
from maecho.lab.report.page.collected import collect
from maecho.lab.report.page.report import figures, page


def report(
    results: Annotated[
        Path | None, typer.Option(help="Folder of the results. By default where `maecho reproduce` writes them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("maecho-report.html"),
    pictures: Annotated[
        Path | None, typer.Option("--figures", help="Also write every picture as an SVG file into this folder.")
    ] = None,
    force: Force = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Make one HTML page of all results that are there: tables beside the paper's, pictures, runs. It needs no network.

    Example: `maecho report --out report.html --open`
    """
    values.check_out(out, force)
    if pictures is not None and pictures.exists() and not pictures.is_dir():
        raise InputError(f"--figures must be a folder, got a file at {pictures}")
    if pictures is not None:
        values.check_folder(pictures, "--figures")
    measured, studies = collect(results_folder() if results is None else results)
    drawn = figures(measured, studies) if pictures is not None else {}
    paths = {name: (pictures or Path()) / name for name in drawn}
    for path in paths.values():
        values.check_out(path, force, option="--figures")
    text = page(measured, studies)
    disk.write_text(out, text)
    for name, (chart, look) in drawn.items():
        disk.write_text(paths[name], svg_file(chart, look))
    console.say("The page: ", console.plain(out, "bold"), whole=True)
    if drawn:
        console.say(f"{len(drawn)} pictures: ", console.plain(pictures, "bold"), whole=True)
    if show:
        open_page(out)


def open_page(path: Path) -> None:
    """Open a page in the browser; say so if there is none."""
    if not webbrowser.open(path.resolve().as_uri()):
        console.say("No browser was found. Open the page yourself.")
