"""The rows of the table of `peers.py`: what both sides do, the plain formulas beside them, and why results differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

import maecho
import other_merges as other
import peer_merges as plain
from maecho.aggregation import Fisher, RegMean

SAME = 1e-5
"""Results with the same settings must not be farther apart."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    peer: str
    ours: Callable[[], plain.State]
    theirs: Callable[[], plain.State]
    plain_ours: Callable[[], plain.State]
    plain_theirs: Callable[[], plain.State]
    reason: str = "none"
    """Why the results differ: a key of REASONS."""
    same: Callable[[], tuple[plain.State, plain.State]] | None = None
    """Ours and theirs with the same settings. None: these are the defaults."""


REASONS = {
    "none": "The same formula; rounding.",
    "files": "The same formula; rounding. Ours checks the digest of all that it reads, theirs checks nothing.",
    "ridge": (
        "Ours pulls towards the average with a ridge; theirs has none, and inverts Σ G in float32. With a ridge inside "
        "the Grams that both get, `RegMean(ridge=0)` and theirs in float64 agree; so do `RegMean(ridge=0, shrink=0.9)` "
        "and `reduce_non_diagonal_ratio=0.9`."
    ),
    "bias": (
        "As `ridge`, and: ours merges [W b] and embeddings by least squares, theirs averages all but the matrices. "
        "Without these layers and biases in our uploads both agree."
    ),
    "weights": (
        "Ours counts a client's information as it is and pulls towards the average. Theirs adds 1e-6 to every value "
        "and divides each client's by their norm. Values so treated, given to `Fisher(ridge=0)`, give theirs."
    ),
    "squares": (
        "As `weights`, and: ours sums squares of every example's gradient, theirs squares one gradient of a whole "
        "batch, of Σ √p log p over examples and classes. `Fisher(ridge=0)` with values of that formula gives theirs."
    ),
}


def doubled(states: list[plain.State]) -> list[plain.State]:
    return [{name: tensor.double() for name, tensor in one.items()} for one in states]


def merges(case: plain.Case, folder: Path) -> Iterator[Row]:
    """The rows of models whose statistics are there."""
    uploads, weights, names = case.uploads, case.weights, case.matrices
    grams, exact = case.grams(), case.grams(torch.float64)
    fishers = [{name: F.float() for name, F in one.items()} for one in case.fishers()]
    average = lambda: plain.plain_average(weights)  # noqa: E731
    yield Row(
        "average", "FusionBench", lambda: maecho.aggregate(uploads, "fedavg"), lambda: other.average(weights),
        average, average,
    )  # fmt: skip
    ours, theirs = written(case, folder)

    def of_files() -> plain.State:
        maecho.aggregate(ours, "fedavg").save(folder / "ours.safetensors")
        return {}

    def by_mergekit() -> plain.State:
        other.linear_of_files(theirs, folder / "theirs")
        return {}

    yield Row(
        "average, file to file", "mergekit", of_files, by_mergekit, average, average, "files",
        same=lambda: (
            maecho.Merged.load(folder / "ours.safetensors"), other.loaded(folder / "theirs" / "model.safetensors"),
        ),
    )  # fmt: skip
    yield Row(
        "average of files", "FusionBench", lambda: maecho.aggregate(ours, "fedavg"),
        lambda: other.average_of_files(theirs), average, average, "files",
    )  # fmt: skip

    def ridged() -> tuple[plain.State, plain.State]:
        both = plain.ridged(exact)
        given = plain.with_gram(uploads, both)
        one = maecho.aggregate(given, RegMean(ridge=0))
        two = other.regmean(doubled(weights), both, names)
        shrunk = (
            maecho.aggregate(given, RegMean(ridge=0, shrink=0.9)),
            other.regmean(doubled(weights), both, names, 0.9),
        )
        return {**one, **{f"shrunk {n}": t for n, t in shrunk[0].items()}}, {
            **two, **{f"shrunk {n}": t for n, t in shrunk[1].items()}
        }  # fmt: skip

    yield Row(
        "RegMean, same Grams", "FusionBench", lambda: maecho.aggregate(uploads, "regmean"),
        lambda: other.regmean(weights, grams, names),
        lambda: plain.plain_regmean(weights, exact, names, RegMean().ridge),
        lambda: plain.plain_regmean(weights, grams, names), "ridge", ridged,
    )  # fmt: skip
    given = plain.with_fisher(uploads, fishers)

    def weighed() -> tuple[plain.State, plain.State]:
        treated = plain.with_fisher(uploads, plain.as_fusionbench_weighs(fishers))
        return maecho.aggregate(treated, Fisher(ridge=0)), other.fisher(weights, fishers)

    yield Row(
        "Fisher, same values", "FusionBench", lambda: maecho.aggregate(given, "fisher"),
        lambda: other.fisher(weights, fishers),
        lambda: plain.plain_fisher(weights, fishers, Fisher().ridge),
        lambda: plain.plain_fisher(weights, plain.as_fusionbench_weighs(fishers)), "weights", weighed,
    )  # fmt: skip


def written(case: plain.Case, folder: Path) -> tuple[list[Path], list[Path]]:
    """The weights of all clients as our uploads, and as plain safetensors files."""
    ours, theirs = [], []
    for i, upload in enumerate(case.uploads):
        ours.append(folder / f"{i:03}.upload.safetensors")
        theirs.append(folder / f"{i:03}.safetensors")
        replace(upload, statistics={}, layers=(), head=None, spaces=None).save(ours[-1])
        save_file({name: tensor.contiguous() for name, tensor in upload.weights.items()}, theirs[-1])
    return ours, theirs


def of_trace_1(grams: plain.State) -> plain.State:
    return {name: G / G.trace() for name, G in grams.items()}


def from_data(case: plain.Case) -> Iterator[Row]:
    """The rows in which both sides gather their statistics themselves."""
    clients = range(len(case.models))

    def ours(method: str | Fisher | RegMean, statistic: str, **options: str) -> plain.State:
        return maecho.aggregate([plain.gathered(case, i, [statistic], **options) for i in clients], method)

    tokens = case.name.startswith("transformer")

    def matrices() -> tuple[plain.State, plain.State]:
        gathered = [plain.matrices_only(plain.gathered(case, i, ["gram"])) for i in clients]
        both = replace(case, uploads=gathered).grams(torch.float64)
        theirs = other.gathered_grams(case)
        gap = max(plain.distance(of_trace_1(a), of_trace_1(b)) for a, b in zip(both, theirs, strict=True))
        if not gap < SAME:
            raise RuntimeError(f"both sides' Grams must be the same times the number of rows, got {gap:.1g} apart")
        ridged = plain.ridged(both)
        names = {layer.name: layer.weight for layer in gathered[0].layers}
        one = maecho.aggregate(plain.with_gram(gathered, ridged), RegMean(ridge=0))
        return one, other.regmean(doubled(case.weights), ridged, names)

    yield Row(
        "RegMean, from data", "FusionBench", lambda: ours("regmean", "gram"), lambda: other.regmean_from_data(case),
        dict, dict, "bias" if tokens else "ridge", matrices,
    )  # fmt: skip

    def squares() -> tuple[plain.State, plain.State]:
        values = [plain.as_fusionbench_gathers(m, own) for m, own in zip(case.models, case.data, strict=True)]
        treated = plain.with_fisher(case.uploads, plain.as_fusionbench_weighs(values))
        return maecho.aggregate(treated, Fisher(ridge=0)), other.fisher_from_data(case)

    for labels in ("sampled", "expected"):
        yield Row(
            f"Fisher ({labels}), from data", "FusionBench",
            lambda labels=labels: ours("fisher", "fisher", labels=labels),  # type: ignore[misc]
            lambda: other.fisher_from_data(case), dict, dict, "squares", squares,
        )  # fmt: skip
