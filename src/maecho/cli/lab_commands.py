"""The commands of the lab: `demo` shows the whole job, `reproduce` makes the tables of the paper."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from maecho import disk
from maecho.cli import console, values
from maecho.cli.options import Json
from maecho.cli.page_commands import open_page
from maecho.errors import InputError, printable
from maecho.lab.data.places import MissingDataError
from maecho.lab.experiment import Experiment, every_name, is_study
from maecho.lab.harness.results import results_path
from maecho.lab.harness.runs import reproduce
from maecho.lab.report import plots
from maecho.lab.report.findings import findings, findings_markdown
from maecho.lab.report.tables import markdown, summarise
from maecho.lab.studies.config import Study
from maecho.lab.studies.runs import reproduce_study


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the uploads and the merged models.")] = Path("maecho-demo"),
    clients: Annotated[int, typer.Option(min=1, help="Number of clients that share the digits.")] = 5,
    beta: Annotated[float, typer.Option(help="Dirichlet β. A smaller β gives a client fewer classes.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed of the split, the initial weights and the training.")] = 0,
    as_json: Json = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page of the run in the browser.")] = False,
) -> None:
    """Show the whole job on scikit-learn's digits: split, train, upload, merge, compare.

    Example: `maecho demo --out demo --clients 5 --beta 0.01`
    """
    from maecho.lab.demo import demo as run
    from maecho.lab.report.page import demo as pages

    # Networks of this size gain nothing from threads, and on a busy machine threads wait for each other for minutes.
    torch.set_num_threads(1)
    values.check_folder(out)
    page = pages.place(out)
    result = run(out, clients, beta, seed)
    disk.write_text(page, pages.page(result, f"maecho demo --clients {clients} --beta {beta} --seed {seed}"))
    if as_json:
        console.print_json({**dataclasses.asdict(result), "page": str(page)})
    else:
        console.show_demo(result, out, page)
    if show:
        open_page(page)


def reproduce_(
    name: Annotated[str | None, typer.Argument(help="A config of experiments/, or the path of a config.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Reproduce all tables and figures, one after the other.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Run it on the embedded digits, in seconds.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at a time, each in a process of one thread.")] = 1,
    device: Annotated[str, typer.Option(help="Device for training and merging: cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Finished runs are not repeated.")] = None,
    columns: Annotated[str | None, typer.Option(help="Run only these columns, separated by commas.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Keep figures made by other code or data, noted.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Run nothing, and show the results that are there.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw accuracy against bytes uploaded into this file (.svg, .png, .pdf).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the picture if it exists.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper, and show our numbers beside the paper's. Without a name, list them all.

    If it is stopped, it goes on from there the next time. Example: `maecho reproduce table-1 --jobs 2`
    """
    if show and (columns is not None or trust):
        raise InputError(f"--show must come without {'--trust' if trust else '--columns'}, got both")
    for option, given in (("a name", name), ("--columns", columns), ("--picture", picture)):
        if every and given is not None:
            raise InputError(f"--all must come without {option}, got both")
    if name is None and not every:
        for known in every_name():
            print(printable(f"{known}: {_load(known).title}"))
        return
    chosen = [_load(one, quick) for one in ([name] if name else every_name())]
    for option, given in (("--columns", columns), ("--picture", picture)):
        if isinstance(chosen[0], Study) and name is not None and given is not None:
            raise InputError(f"{option} must come with a table of accuracies, got the study {chosen[0].name}")
    if picture is not None:
        plots.check(picture)
        values.check_out(picture, force, option="--picture")
    if out is not None and not show:
        values.check_folder(out)
    found, missing = {}, []
    for experiment in chosen:
        if isinstance(experiment, Study):
            try:
                found[experiment.name] = _study(experiment, out, device, not show, trust, as_markdown, as_json)
            except MissingDataError as error:
                if not every:
                    raise
                missing.append(f"{experiment.name} ({error})")
            continue
        wanted = [] if show else list(experiment.methods) if columns is None else experiment.columns_in(columns)
        try:
            with console.run_progress(experiment, len(wanted)) as on_event:
                results = reproduce(experiment, out, jobs, device, on_event, wanted, trust)
        except MissingDataError as error:
            if not every:
                raise
            missing.append(f"{experiment.name} ({error})")
            continue
        found[experiment.name] = results
        table = summarise(experiment, results)
        if as_markdown:
            print(markdown(experiment, table))
        elif not as_json:
            console.show_results(experiment, table, results_path(experiment, out))
        if picture is not None:
            plots.against_bytes(experiment, table, picture)
    if as_json:
        console.print_json(found if every else found[chosen[0].name])
    if missing:
        raise InputError(f"{len(found)} of {len(chosen)} are reproduced, got no data for {'; '.join(missing)}")


def _load(name: str, quick: bool = False) -> Experiment | Study:
    return Study.load(name, quick) if is_study(name) else Experiment.load(name, quick)


def _study(
    study: Study, out: Path | None, device: str, run: bool, trust: bool, as_markdown: bool, as_json: bool
) -> dict[str, Any]:
    """Reproduce a study and show its numbers."""
    with console.study_progress(study) as on_event:
        results = reproduce_study(study, out, device, on_event, run, trust)
    if as_markdown:
        print(findings_markdown(study, results))
    elif not as_json:
        console.show_findings(study, findings(study, results), results_path(study, out))
    return results
