"""The commands of `maecho`. An error is one sentence on stderr and exit code 2."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from maecho._version import __version__
from maecho.aggregation import METHODS, aggregate
from maecho.cli import console, factories, values
from maecho.errors import InputError, one_line
from maecho.evaluation import Ensemble, evaluate
from maecho.lab.experiment import Experiment, names
from maecho.lab.harness.results import results_path
from maecho.lab.harness.runs import reproduce
from maecho.lab.report import plots
from maecho.lab.report.tables import ladders, markdown, summarise
from maecho.privacy import Privacy
from maecho.statistics import STATISTICS
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload

app = typer.Typer(
    help="One model out of many: one-shot federated learning without server-side training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

DEFAULT = [name for name, statistic in STATISTICS.items() if statistic.by_default]
PRIVATE = [name for name, statistic in STATISTICS.items() if statistic.private]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Model = Annotated[
    str, typer.Option(help="The network, as package.module:factory; the factory returns a torch.nn.Module.")
]
Data = Annotated[
    str, typer.Option(help="The data, as package.module:factory; the factory returns (inputs, labels) batches.")
]

Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]


def main() -> None:
    """Run the command line. With MAECHO_DEBUG=1 an error shows its traceback."""
    warnings.showwarning = lambda message, *_: print(f"warning: {one_line(str(message))}", file=sys.stderr)
    try:
        app()
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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the uploads and the merged models.")] = Path("maecho-demo"),
    clients: Annotated[int, typer.Option(min=1, help="Number of clients that share the digits.")] = 5,
    beta: Annotated[float, typer.Option(help="Dirichlet β. A smaller β gives a client fewer classes.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed of the split, the initial weights and the training.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the whole job on scikit-learn's digits: split, train, upload, merge, compare.

    Example: `maecho demo --out demo --clients 5 --beta 0.01`
    """
    from maecho.lab.demo import demo as run

    result = run(out, clients, beta, seed)
    if as_json:
        console.print_json(dataclasses.asdict(result))
    else:
        console.show_demo(result, out)


@app.command()
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
    rank: Annotated[
        str,
        typer.Option(
            help='How far to cut statistics: a rank (64), a share of energy (0.999), a size (3x, "5 MB"), or all.'
        ),
    ] = "4x",
    labels: Annotated[
        values.Labels,
        typer.Option(help="Labels for fisher and gradients: the model's own, samples of these, or the data's."),
    ] = values.Labels.expected,
    seed: Annotated[int, typer.Option(help="Seed for --labels sampled.")] = 0,
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
    values.check_out(out, force, [] if weights is None else [weights])
    permissions = values.permissions(mode)
    made = make_upload(
        factories.model(model, weights),
        factories.batches(data),
        client,
        values.words(statistics),
        values.rank(rank),
        labels=labels.value,
        generator=torch.Generator().manual_seed(seed),
        privacy=privacy,
    )
    made.save(out, permissions)
    console.show_upload(out, as_json)


@app.command("aggregate")
def aggregate_(
    uploads: Annotated[list[Path], typer.Argument(help="Upload files, one for each client.")],
    out: Annotated[Path, typer.Option(help="The merged model to write (safetensors).")],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "ma-echo",
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the method, as name=value. `maecho methods` lists the options."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The network, as package.module:factory, for methods that run it (dense, echo-chain)."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device that does the work: cpu or cuda.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Merge upload files into one model.

    Example: `maecho aggregate clinic-*.safetensors --method ma-echo --set steps=60 --out merged.safetensors`
    """
    values.check_out(out, force, uploads)
    network = None if model is None else factories.model(model)
    chosen = values.options(method, options or [])
    if device is not None and chosen.setdefault("device", device) != device:
        raise InputError(f"device must be given once, got --device {device} and --set device={chosen['device']}")
    merged = aggregate(uploads, method, model=network, **chosen)
    merged.save(out)
    if as_json:
        console.print_json({"out": str(out), "averaged": merged.averaged, "recipe": merged.recipe})
    else:
        console.show_merged(merged, out)


@app.command("evaluate")
def evaluate_(
    model: Model,
    data: Data,
    weights: Annotated[
        list[Path] | None,
        typer.Option(help="A merged model, an upload or any safetensors state_dict. Several make an ensemble."),
    ] = None,
    by: Annotated[values.By, typer.Option(help="How an ensemble combines outputs.")] = values.By.probabilities,
    as_json: Json = False,
) -> None:
    """Measure the accuracy of a model, or of an ensemble of models, overall and per class.

    Example: `maecho evaluate --model clinic:network --weights merged.safetensors --data clinic:test`
    """
    paths = weights or []
    models = [factories.model(model, path) for path in paths] or [factories.model(model)]
    chosen = models[0]
    if len(models) > 1:
        only = [Upload.load(path, only=("classes",)) for path in paths] if by is values.By.class_aware else []
        counts = [upload.statistics.get("classes") for upload in only]
        chosen = Ensemble(models, by.value, counts)
    found = evaluate(chosen, factories.batches(data))
    if as_json:
        per_class = [None if n == 0 else right / n for right, n in zip(found.correct, found.examples, strict=True)]
        console.print_json({"accuracy": found.accuracy, "examples": sum(found.examples), "per_class": per_class})
    else:
        console.show_evaluation(found, "model" if len(models) == 1 else f"ensemble of {len(models)} by {by}")


@app.command()
def inspect(file: Annotated[Path, typer.Argument(help="An upload file.")], as_json: Json = False) -> None:
    """Show what leaves a client: every tensor, its shape, bytes and rank, and in plain words what it can reveal.

    Example: `maecho inspect clinic-a.safetensors`
    """
    console.show_upload(file, as_json)


@app.command()
def methods(as_json: Json = False) -> None:
    """List every method, what it needs uploaded, and its options. Show what each further round brings and costs.

    Example: `maecho methods`
    """
    if as_json:
        console.print_json(
            {
                name: {"needs": sorted(m.needs), **dataclasses.asdict(m.guide), "options": values.defaults(m)}
                | ({"ladder": [dataclasses.asdict(one) for one in ladders()]} if name == "echo-chain" else {})
                for name, m in METHODS.items()
            }
        )
    else:
        console.show_methods({name: (m.guide, values.defaults(m)) for name, m in METHODS.items()})
        console.show_ladders(ladders())


@app.command("reproduce")
def reproduce_(
    name: Annotated[str | None, typer.Argument(help="A config of experiments/, or the path of a config.")] = None,
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
    """Reproduce a table of the paper, and show our figures beside the paper's. Without a name, list all tables.

    If it is stopped, it goes on from there the next time. Example: `maecho reproduce table-1 --jobs 2`
    """
    if show and (columns is not None or trust):
        raise InputError(f"--show must come without {'--trust' if trust else '--columns'}, got both")
    if name is None:
        for known in names():
            print(f"{known}: {Experiment.load(known).title}")
        return
    experiment = Experiment.load(name, quick)
    if picture is not None:
        plots.check(picture)
        values.check_out(picture, force, option="--picture")
    wanted = [] if show else list(experiment.methods) if columns is None else experiment.columns_in(columns)
    with console.run_progress(experiment, len(wanted)) as on_event:
        results = reproduce(experiment, out, jobs, device, on_event, wanted, trust)
    table = summarise(experiment, results)
    if as_json:
        console.print_json(results)
    elif as_markdown:
        print(markdown(experiment, table))
    else:
        console.show_results(experiment, table, results_path(experiment, out))
    if picture is not None:
        plots.against_bytes(experiment, table, picture)
