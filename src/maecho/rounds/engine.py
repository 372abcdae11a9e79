"""Many rounds in one process: a sample of clients trains, a server merges, the global model is measured, again and
again.

Nothing here sends anything. Every random choice is drawn from the seed and the number of the round, so that a run that
was stopped and goes on from its checkpoint ends with the same weights, bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from maecho.errors import InputError
from maecho.evaluation import evaluate
from maecho.options import number
from maecho.randomness import seed_of
from maecho.rounds.checkpoint import read_checkpoint, write_checkpoint
from maecho.rounds.history import DivergedError, History, RoundRecord
from maecho.rounds.local import Local
from maecho.rounds.one_by_one import train_one
from maecho.rounds.peers import Average
from maecho.rounds.servers import Returned, Round, Server, State, Weights
from maecho.rounds.side_by_side import train_together, why_not, worth_it
from maecho.rounds.stack import Work

Client = tuple[Tensor, Tensor]
"""A client's inputs and labels."""
TOGETHER = 10
"""The most clients that are trained at once: their weights and inputs are in memory together."""


@dataclass(frozen=True)
class Rounds:
    """A run of many rounds."""

    rounds: int = 50
    sampled: int = 10
    """How many clients take part in a round."""
    server: Server = field(default_factory=Average)
    local: Local | None = field(default_factory=Local)
    """Local training; None: nobody trains, and only statistics are gathered."""
    seed: int = 0
    side_by_side: bool = True
    """Train the clients of a round at once where the network allows it and it is faster. It changes results by rounding
    alone."""

    def __post_init__(self) -> None:
        number("rounds", self.rounds, "a whole number, at least 1", 1, whole=True)
        number("sampled", self.sampled, "a whole number, at least 1", 1, whole=True)
        number("seed", self.seed, "a whole number, at least 0", 0, whole=True)

    def __call__(
        self,
        model: nn.Module,
        clients: Sequence[Client],
        test: Client,
        checkpoint: str | Path | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> History:
        """Run all rounds, or those that a checkpoint lacks.

        Args:
            model: the network, with the weights of the start. It is not changed.
            clients: the inputs and labels of every client.
            test: inputs and labels on which the global model is measured after each round.
            checkpoint: a file that is written after every round. If it exists, the run goes on from it. It must be of
                the same settings, network and clients.
            on_round: called after every round.

        Raises DivergedError, which has the rounds before, if no client returns a model or the merged one is not finite.
        """
        _check(clients, test, self.sampled)
        network = copy.deepcopy(model)
        weights: Weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        path, identity = None if checkpoint is None else Path(checkpoint), self._identity(weights, clients, test)
        state: State = {}
        records: list[RoundRecord] = []
        if path is not None and path.exists():
            weights, state, records = read_checkpoint(path, identity)
            if len(records) > self.rounds:
                raise InputError(
                    f"{path} must be a checkpoint of at most the {self.rounds} rounds that are asked for, got one of "
                    f"{len(records)}"
                )
        trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        for number_ in range(len(records) + 1, self.rounds + 1):
            try:
                weights, state, record = self._round(number_, network, weights, state, clients, test, trained)
            except FloatingPointError as error:
                raise DivergedError(f"round {number_}: {error}", History(weights, tuple(records))) from error
            records.append(record)
            if path is not None:
                write_checkpoint(path, identity, weights, state, records)
            if on_round is not None:
                on_round(record)
        return History(weights, tuple(records))

    def _round(
        self,
        number_: int,
        network: nn.Module,
        weights: Weights,
        state: State,
        clients: Sequence[Client],
        test: Client,
        trained: frozenset[str],
    ) -> tuple[Weights, State, RoundRecord]:
        sample = self.sample(number_, len(clients))
        began = time.perf_counter()
        returned, left_out = self._train(number_, network, weights, state, clients, sample)
        training = time.perf_counter() - began
        if not returned:
            said = "; ".join(f"client {client}: {why}" for client, why in left_out.items())
            raise FloatingPointError(f"at least one client must return a model, got none ({said})")
        began = time.perf_counter()
        round_ = Round(number_, weights, returned, self.local or Local(), len(clients), trained, network)
        try:
            outcome = self.server(round_, state)
        except InputError as error:
            raise InputError(f"round {number_}: {error}") from error
        merging = time.perf_counter() - began
        odd = next((name for name, t in outcome.weights.items() if not t.isfinite().all()), None)
        if odd is not None:
            raise FloatingPointError(f"the merged model must be finite, got NaN or infinity in {odd!r}")
        began = time.perf_counter()
        model = round_.loaded(outcome.weights)
        try:
            measured = evaluate(model, zip(test[0].split(1000), test[1].split(1000), strict=True))
        except InputError:
            with torch.no_grad():
                if all(model(x).isfinite().all() for x in test[0].split(1000)):
                    raise
            raise FloatingPointError("the merged model must give finite outputs, got NaN or infinity") from None
        norms = {n: float(t.double().norm()) for n, t in outcome.weights.items() if n in trained and t.dim() > 1}
        record = RoundRecord(
            number_, tuple(sample), left_out, measured.accuracy, outcome.bytes, training, merging,
            time.perf_counter() - began, norms,
        )  # fmt: skip
        return outcome.weights, outcome.state, record

    def _seed_of(self, purpose: str) -> int:
        return seed_of(f"rounds {self.seed}: {purpose}")

    def sample(self, number_: int, clients: int) -> list[int]:
        """Which clients take part in this round."""
        rng = np.random.default_rng(self._seed_of(f"the clients of round {number_}"))
        return sorted(int(i) for i in rng.choice(clients, self.sampled, replace=False))

    def _train(
        self,
        number_: int,
        network: nn.Module,
        weights: Weights,
        state: State,
        clients: Sequence[Client],
        sample: list[int],
    ) -> tuple[list[Returned], dict[int, str]]:
        """What the clients return, in the order of sampling; and why others are left out."""
        local = self.local
        if local is None:
            return [Returned(i, weights, *clients[i]) for i in sample], {}
        works = {
            i: Work(*clients[i], self.server.correction(weights, state, i), self._seed_of(f"client {i} in {number_}"))
            for i in sample
        }
        found: dict[int, dict[str, Tensor]] = {}
        left_out: dict[int, str] = {}
        if self.side_by_side and not why_not(network):
            for group in _alike(works):
                if not worth_it(network, [works[i] for i in group]):
                    continue
                try:
                    together = train_together(network, weights, [works[i] for i in group], local)
                    found |= dict(zip(group, together, strict=True))
                except Exception:
                    continue  # one of them fails, or torch.func cannot batch this network: they are trained one by one
        for i in sample:
            try:
                if i not in found:
                    work = works[i]
                    found[i] = train_one(network, weights, work.x, work.y, local, work.correction, work.seed)
            except Exception as error:  # whatever a user's network raises
                left_out[i] = " ".join(str(error).split()) or type(error).__name__
                continue
            odd = next((name for name, t in found[i].items() if not t.isfinite().all()), None)
            if odd is not None:
                left_out[i] = f"NaN or infinity in {odd!r} after training"
                del found[i]
        return [Returned(i, found[i], *clients[i]) for i in sample if i in found], left_out

    def _identity(self, weights: Weights, clients: Sequence[Client], test: Client) -> str:
        """A hash of all that decides the result, but for the number of rounds: a run may be made longer."""
        hashed = hashlib.sha256(repr((self.sampled, self.server, self.local, self.seed, self.side_by_side)).encode())
        for tensor in (*weights.values(), *(t for client in (*clients, test) for t in client)):
            hashed.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()[:20]


def _alike(works: Mapping[int, Work]) -> list[list[int]]:
    """Clients whose inputs have one shape and type, at most TOGETHER at a time."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, work in works.items():
        groups.setdefault((work.x.shape[1:], work.x.dtype, work.y.dtype), []).append(i)
    return [group[k : k + TOGETHER] for group in groups.values() for k in range(0, len(group), TOGETHER)]


def _check(clients: Sequence[Client], test: Client, sampled: int) -> None:
    if sampled > len(clients):
        raise InputError(f"sampled must be at most the number of clients, {len(clients)}, got {sampled}")
    for who, (x, y) in [(f"client {i}", client) for i, client in enumerate(clients)] + [("the test", test)]:
        tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        if not tensors or y.dim() != 1 or len(x) != len(y) or y.dtype != torch.int64:
            got = [f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__ for t in (x, y)]
            raise InputError(f"{who} must have inputs and one int64 label for each, got {' and '.join(got)}")
        if not len(y):
            raise InputError(f"{who} must have at least one example, got none")
        if int(y.min()) < 0:
            raise InputError(f"{who} must have labels from 0 on, got {int(y.min())}")
