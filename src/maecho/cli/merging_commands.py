"""The commands of the server: `aggregate` merges files, `evaluate` measures models, `methods` lists the methods."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from maecho.aggregation import METHODS, aggregate
from maecho.alignment.skeleton import NoNetworkError
from maecho.cli import console, factories, values
from maecho.cli.options import Data, Force, Json, Model
from maecho.errors import InputError
from maecho.evaluation import Ensemble, evaluate
from maecho.lab.report.tables import ladders
from maecho.upload.upload import Upload


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
    values.check_out(out, force, [*uploads, *factories.sources(model)])
    network = None if model is None else factories.model(model)
    chosen = values.options(method, options or [])
    if device is not None and chosen.setdefault("device", device) != device:
        raise InputError(f"device must be given once, got --device {device} and --set device={chosen['device']}")
    try:
        merged = aggregate(uploads, method, model=network, **chosen)
    except NoNetworkError as error:
        raise InputError(f"{error.sentence}; give it as --model package.module:factory") from error
    merged.save(out)
    if as_json:
        console.print_json({"out": str(out), "averaged": merged.averaged, "recipe": merged.recipe})
    else:
        console.show_merged(merged, out)


def evaluate_(
    model: Model,
    data: Data,
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            help="A merged model, an upload, or a state_dict in safetensors or by torch.save. Several make an ensemble."
        ),
    ] = None,
    by: Annotated[values.By, typer.Option(help="How an ensemble combines outputs.")] = values.By.probabilities,
    as_json: Json = False,
) -> None:
    """Measure the accuracy of a model, or of an ensemble of models, overall and per class, and its calibration error.

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
        console.print_json(
            {
                "accuracy": found.accuracy,
                "calibration_error": found.calibration_error,
                "examples": sum(found.examples),
                "per_class": per_class,
            }
        )
    else:
        console.show_evaluation(found, "model" if len(models) == 1 else f"ensemble of {len(models)} by {by}")


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
