"""Measures the columns of one run, and makes the record of each.

A column is measured on a `Bench`. The bench trains the clients and gathers their statistics when they are first asked
for, and keeps the time of both.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from maecho.aggregation import aggregate, choose
from maecho.aggregation.ma_echo import Iteration
from maecho.echo.relay import relay
from maecho.evaluation import Ensemble, evaluate
from maecho.lab import data, networks
from maecho.lab.columns import drawn_by, gathered, plain, protocol, settings
from maecho.lab.harness.cache import digest
from maecho.lab.harness.clients import Client, Cohort, Trained
from maecho.lab.harness.code import Code
from maecho.lab.harness.machine import machine, versions
from maecho.network import spaces
from maecho.statistics import STATISTICS
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload

Options = Mapping[str, Any]
"""A column of a config: its method and what it sets."""

TEST_BATCH = 1000


@dataclass(frozen=True)
class Measured:
    """The result of one column."""

    models: list[nn.Module]
    """The accuracy of the column is the mean over these models."""
    trained: list[Trained]
    """The models that were trained for the column."""
    bytes: int
    """The upload size of the client that sends the most."""
    gathering: float
    """Seconds of passes over the clients' data before anything is merged, all clients together."""
    merging: float
    """Seconds of everything after that."""
    curve: Mapping[int, float] = field(default_factory=dict)
    """Step -> the accuracy after it, if the column asks for a curve."""


@dataclass(frozen=True)
class TimedUploads:
    """The uploads of all clients."""

    uploads: list[Upload]
    seconds: float


class Bench:
    """The clients of one run, and what was gathered from them so far."""

    def __init__(self, cohort: Cohort, device: str, on_client: Callable[[int, int], None] | None = None):
        self.cohort, self.device, self._on_client = cohort, device, on_client
        self._gathered: dict[str, TimedUploads] = {}
        self.chains: dict[str, tuple[Mapping[str, Tensor], float]] = {}
        """Networks that echo-chain has fitted, with the seconds it took, by the options that decide them. Relays go on
        from these."""

    @cached_property
    def trained(self) -> list[Trained]:
        return self.cohort.train(self.device, self._on_client)

    @cached_property
    def models(self) -> list[nn.Module]:
        """The clients' models on the device."""
        return [one.model.to(self.device) for one in self.trained]

    @property
    def clients(self) -> list[Client]:
        """The clients' models, each with its data in the order of a first pass. What a column finds must not depend on
        how many passes other columns made before."""
        return [(model, self.cohort.batches(i)) for i, model in enumerate(self.models)]

    @property
    def weights_bytes(self) -> int:
        """The size of one client's weights."""
        return sum(tensor.nbytes for tensor in self.network().state_dict().values())

    def network(self, name: str | None = None) -> nn.Module:
        """A network of that name, by default of the clients' architecture, always with the same weights."""
        return networks.build(name or self.cohort.experiment.network, torch.Generator().manual_seed(0))

    def models_of(self, network: str | None) -> list[Client]:
        """The clients with their trained models, or with an untrained network, which is the same for all."""
        if network is None:
            return self.clients
        model = self.network(network).to(self.device).eval()
        return [(model, self.cohort.batches(i)) for i in range(len(self.cohort.parts))]

    def gather(self, names: Collection[str], how: Mapping[str, Any], network: str | None = None) -> TimedUploads:
        """Make uploads with these statistics. Columns that need the same uploads share them."""
        key = repr((sorted(names), how, network))
        if key not in self._gathered:
            players = self.models_of(network)
            began = time.perf_counter()
            uploads = [
                make_upload(
                    model,
                    batches,
                    f"client-{i:03}",
                    sorted(names),
                    progress=False,
                    generator=self.cohort.streams.labels(i),
                    **{"rank": None, "mean_of": self.cohort.mean_of, **how},
                )
                for i, (model, batches) in enumerate(players)
            ]
            # If they do not all fit, `aggregate` moves each of them when it reads it.
            with contextlib.suppress(torch.OutOfMemoryError):
                uploads = [upload.to(self.device) for upload in uploads]
            self._gathered[key] = TimedUploads(uploads, time.perf_counter() - began)
        return self._gathered[key]


def local(bench: Bench, options: Options) -> Measured:
    """Every client's own model, which nobody sends."""
    return Measured(bench.models, bench.trained, 0, 0.0, 0.0)


def pooled(bench: Bench, options: Options) -> Measured:
    """One model, trained on the data of all clients together: the ceiling."""
    (one,) = bench.cohort.pooled().train(bench.device)
    return Measured([one.model], [one], 0, 0.0, 0.0)


def ensemble(bench: Bench, options: Options) -> Measured:
    """The ensemble of all clients' models."""
    counts = [torch.tensor(counts) for counts in bench.cohort.class_counts]
    by = options.get("by", "probabilities")
    sent = bench.weights_bytes + (counts[0].nbytes if by == "class-aware" else 0)
    return Measured([Ensemble(bench.models, by, counts)], bench.trained, sent, 0.0, 0.0)


def relayed(bench: Bench, options: Options) -> Measured:
    """echo-relay. Where inputs are drawn, it goes on from an echo-chain that has drawn the same."""
    arguments = protocol(options, bench.cohort.streams.method())
    drawn = "drawing" in arguments
    before = bench.gather(gathered(options), options.get("upload", {})) if drawn else TimedUploads([], 0.0)
    start, already = bench.chains.get(drawn_by(options) or "", (None, 0.0))
    began = time.perf_counter()
    merged = relay(
        bench.network().to(bench.device),
        bench.clients,
        uploads=before.uploads if drawn else None,
        start=start,
        progress=False,
        **arguments,
    )
    model = bench.network()
    model.load_state_dict(merged)
    sent = merged.recipe["upload_bytes"] + sum(stage["bytes"] for stage in merged.recipe["rounds"])
    return Measured([model], bench.trained, sent, before.seconds, already + time.perf_counter() - began)


def merged(bench: Bench, options: Options) -> Measured:
    """A method of METHODS."""
    wanted, network = gathered(options), options.get("network")
    found = bench.gather(wanted, options.get("upload", {}), network)
    # A copy of the options with the run's seed, if the method draws anything and the config does not say how.
    arguments: dict[str, Any] = {"device": bench.device, **plain(options)}
    if any(f.name == "seed" for f in fields(choose(**plain(options))[1])):  # type: ignore[arg-type]
        arguments.setdefault("seed", bench.cohort.streams.method())
    model = bench.network(network)
    curve = _Curve(bench, options["curve"]) if "curve" in options else None
    if curve is not None:
        arguments["watch"] = curve
    began = time.perf_counter()
    state = aggregate(found.uploads, model=model, **arguments)
    seconds = time.perf_counter() - began - (curve.seconds if curve is not None else 0.0)
    key = drawn_by(options)
    if key is not None:
        bench.chains[key] = state, seconds
    sent = max(upload.bytes(wanted) for upload in found.uploads)
    trained = bench.trained if network is None else []
    accuracies = {} if curve is None else curve.found
    return Measured([spaces.load(model, state)], trained, sent, found.seconds, seconds, accuracies)


class _Curve:
    """Measures the accuracy of the global model after some of a method's steps."""

    def __init__(self, bench: Bench, steps: Collection[int]):
        self._bench, self._steps = bench, frozenset(steps)
        self.found: dict[int, float] = {}
        self.seconds = 0.0
        """Seconds that were spent on measuring accuracies. They are no part of the method's own time."""

    def __call__(self, iteration: Iteration) -> None:
        if iteration.step in self._steps:
            began = time.perf_counter()
            model = spaces.load(self._bench.network(), iteration.merged())
            self.found[iteration.step] = accuracy([model], self._bench.cohort.dataset, self._bench.device)
            self.seconds += time.perf_counter() - began


KINDS: dict[str, Callable[[Bench, Options], Measured]] = {
    "local": local,
    "pooled": pooled,
    "ensemble": ensemble,
    "echo-relay": relayed,
}
"""What is measured for the methods that need the clients themselves. All others are `merged`."""


def code_of(options: Options) -> Code:
    """All code that a column depends on beside that of its clients."""
    rows: list[Any] = [type(STATISTICS[name]) for name in sorted(gathered(options))]
    if options["method"] not in KINDS:
        rows.append(type(choose(**plain(options))[1]))
    if "network" in options:
        rows.append(networks.NETWORKS[options["network"]])
    return Code.of(KINDS.get(options["method"], merged), accuracy, *rows)


def measure(bench: Bench, options: Options) -> dict[str, Any]:
    """Measure a column. Its record says all that it depends on."""
    found = KINDS.get(options["method"], merged)(bench, options)
    curve = {"curve": [[step, value] for step, value in sorted(found.curve.items())]} if "curve" in options else {}
    return {
        "settings": settings(options),
        "accuracy": accuracy(found.models, bench.cohort.dataset, bench.device),
        "seconds": {
            "training": round(sum(one.seconds for one in found.trained), 4),
            "gathering": round(found.gathering, 4),
            "merging": round(found.merging, 4),
        },
        "bytes": found.bytes,
        "device": machine(bench.device),
        "trained_on": ", ".join(sorted({one.device for one in found.trained})),
        "versions": versions(),
        "data": bench.cohort.dataset.digest,
        "clients": bench.cohort.made_of,
        "weights": digest(*(one.weights for one in found.trained)),
        "code": code_of(options).digest,
        **curve,
    }


def accuracy(models: list[nn.Module], dataset: data.Dataset, device: str) -> float:
    """The accuracy on the test examples in per cent. For several models it is the mean."""
    test = data.batches(dataset.x_test, dataset.y_test, TEST_BATCH)
    return round(100 * statistics.fmean(evaluate(one.to(device), test, progress=False).accuracy for one in models), 2)
