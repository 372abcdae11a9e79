"""Servers that merge what clients return by a method of METHODS, or by a relay through all layers; and sums of earlier
rounds that count on.

The clients of one round see few classes, and a closed form forgets what nobody in the round has. But sums over examples
can be
kept: those of earlier rounds count on with a factor. For RegMean, the merged W and the kept Σ G stand for Σ W_i G_i and
    Σ G_i, as far as W solved W Σ G_i = Σ W_i G_i. So earlier rounds take part as one more client. The relay keeps the
    sums of its stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maecho.aggregation import aggregate, choose, gathered_for
from maecho.aggregation.method import Method
from maecho.echo import wire
from maecho.echo.client import RelayClient
from maecho.echo.fit import Regression
from maecho.echo.server import RelayServer
from maecho.errors import InputError
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal
from maecho.network.packed.twin import twin_of
from maecho.options import number
from maecho.rounds.servers import NoCorrection, Outcome, Round, State, Weights
from maecho.statistics.projector import RELEASED_MEAN_OF
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload

SUMS = ("gram", "fisher")
"""Statistics whose sums can be kept: with them the merged model stands for all that it was made of."""
EARLIER = "earlier rounds"


@dataclass(frozen=True)
class Merging(NoCorrection):
    """A method of METHODS in the place of the average.

    Args:
        method: its name, or the method with its options.
        kept: the factor with which sums of earlier rounds count on, from 0 (not at all) to 1 (all that was ever said).
            Only for methods that need nothing but sums.
        once: every client's sums count once, whenever it comes; a client that comes back adds nothing. This is exact,
            whatever the order, for a network whose inputs to the merged layer never change: a frozen network with a
            solved head.
    """

    method: str | Method = "ma-echo"
    kept: float = 0.0
    once: bool = False

    def __post_init__(self) -> None:
        number("kept", self.kept, "from 0 to 1", 0, 1)
        name, method = choose(self.method)
        sums = sorted(gathered_for(method) - {"classes"})
        if (self.kept or self.once) and not (sums and all(one in (*SUMS, "targets") for one in sums)):
            reads = ", ".join(sums) or "weights"
            raise InputError(f"kept sums need a method that reads sums alone, got {name}, which reads {reads}")
        if self.once and self.kept not in (0.0, 1.0):
            raise InputError(f"with once every sum counts in full, got kept = {self.kept:g}")

    def __call__(self, round_: Round, state: State) -> Outcome:
        _, method = choose(self.method)
        wanted = sorted(gathered_for(method))
        seen = {int(key.removeprefix("seen ")) for key in state if key.startswith("seen ")}
        fresh = [one for one in round_.returned if not (self.once and one.client in seen)]
        uploads = [
            make_upload(
                round_.loaded(one.weights),
                one.batches(),
                f"client {one.client}",
                wanted,
                None,
                progress=False,
                mean_of=RELEASED_MEAN_OF,
            )
            for one in fresh
        ]
        if not uploads:
            return Outcome(round_.weights, state, 0)
        sent = max(upload.bytes() for upload in uploads)
        factor = 1.0 if self.once else self.kept
        earlier = None
        if factor:
            of_twin = twin_of(round_.loaded(round_.weights), always_copy=False).network.state_dict()
            earlier = _earlier(state, uploads, of_twin)
        given = uploads if earlier is None else [*uploads, earlier]
        merged = aggregate(given, self.method, model=round_.loaded(round_.weights))
        if not factor:
            return Outcome(dict(merged), state, sent)
        new = _summed(given, factor)
        if self.once:
            new |= {f"seen {client}": torch.ones(()) for client in seen | {one.client for one in fresh}}
        return Outcome(dict(merged), new, sent)


def _summed(uploads: list[Upload], factor: float) -> dict[str, Tensor]:
    """The sums over these uploads, times the factor, as tensors for the state."""
    out: dict[str, Tensor] = {"examples": torch.tensor(factor * sum(u.examples for u in uploads), dtype=torch.float64)}
    for upload in uploads:
        for name, value in upload.statistics.items():
            if name == "classes":
                entries: Iterable[tuple[str, Any]] = [("", value)]
            else:
                entries = value.items() if hasattr(value, "items") else [("", value)]
            for entry, part in entries:
                dense = (
                    part.values if isinstance(part, Diagonal) else part.dense() if isinstance(part, Spectrum) else part
                )
                key = f"sum {name} {entry}"
                out[key] = out[key] + factor * dense.double() if key in out else factor * dense.double()
    return out


def _earlier(state: State, uploads: list[Upload], weights: Weights) -> Upload | None:
    """All earlier rounds, as one more client with the global model that was made of them."""
    if "examples" not in state:
        return None
    like = uploads[0]
    statistics: dict[str, Any] = {}
    for name, value in like.statistics.items():
        found = {key.split(" ", 2)[2]: t for key, t in state.items() if key.startswith(f"sum {name} ")}
        if isinstance(value, Tensor):
            statistics[name] = found[""].round().to(value.dtype) if not value.is_floating_point() else found[""]
        else:
            statistics[name] = {entry: _as(part, found[entry]) for entry, part in value.items()}
    examples = max(1, round(float(state["examples"])))
    kept = {name: t for name, t in weights.items() if name in like.weights}
    return Upload(
        EARLIER, examples, kept, like.layers, like.head, like.aliases, like.spaces, statistics, stored=like.stored
    )


def _as(part: Any, dense: Tensor) -> Any:
    """A kept sum in the form that a client's has."""
    if isinstance(part, Spectrum):
        return Spectrum.of_dense(dense)
    return Diagonal(dense) if isinstance(part, Diagonal) else dense


@dataclass(frozen=True)
class Relaying(NoCorrection):
    """echo-relay in the place of the average: a light round a layer, with the round's clients.

    Args:
        regression: the options of the fits.
        kept: the factor with which the sums of earlier rounds count on, from 0 to below 1.
    """

    regression: Regression = field(default_factory=Regression)
    kept: float = 0.0

    def __post_init__(self) -> None:
        number("kept", self.kept, "at least 0 and below 1", 0, 1 - 1e-9)

    def __call__(self, round_: Round, state: State) -> Outcome:
        clients = [
            RelayClient(round_.loaded(one.weights), one.batches(), f"client {one.client}", progress=False)
            for one in round_.returned
        ]
        server = RelayServer(round_.loaded(round_.weights), regression=self.regression)
        new: dict[str, Tensor] = {}
        sent = 0
        while not server.done:
            question = server.broadcast()
            answers = [client.answer(question).tensors() for client in clients]
            sent += max(sum(t.nbytes for t in answer.values()) for answer in answers)
            if self.kept and not question.opening:
                prefix = f"stage {question.round} "
                earlier = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
                answers += [earlier] if earlier else []
                total = answers[0]
                for answer in answers[1:]:
                    total = wire.add(total, answer)
                new |= {f"{prefix}{k}": self.kept * t if t.is_floating_point() else t for k, t in total.items()}
            server.collect(answers)
        return Outcome(dict(server.result()), new, sent)
