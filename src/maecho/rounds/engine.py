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
from maecho.linalg.finite import is_finite
from maecho.options import number
from maecho.randomness import seed_of
from maecho.rounds.checkpoint import read_checkpoint, write_checkpoint
from maecho.rounds.history import DivergedError, History, RoundRecord
from maecho.rounds.peers import Average
from maecho.rounds.servers import Outcome, Returned, Round, Server, State, Weights
from maecho.rounds.training.local import Local
from maecho.rounds.training.losses import OwnClasses
from maecho.rounds.training.one_by_one import train_one
from maecho.rounds.training.side_by_side import train_together, why_not, worth_it
from maecho.rounds.training.sphere import FixedHead
from maecho.rounds.training.stack import Work

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
        self._check_loss(clients)
        federation = self._federation(model, clients, test)
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
        for number_ in range(len(records) + 1, self.rounds + 1):
            try:
                weights, state, record = self._round(number_, federation, weights, state)
            except FloatingPointError as error:
                raise DivergedError(f"round {number_}: {error}", History(weights, tuple(records))) from error
            records.append(record)
            if path is not None:
                write_checkpoint(path, identity, weights, state, records)
            if on_round is not None:
                on_round(record)
        return History(weights, tuple(records))

    def _check_loss(self, clients: Sequence[Client]) -> None:
        own = self.local is not None and isinstance(self.local.loss, OwnClasses)
        if own and all(len(y.unique()) == 1 for _, y in clients):
            raise InputError(
                "a loss over own classes needs clients of at least two classes, got clients of one class each, who "
                "would learn nothing; use another loss, and clipped gradients"
            )

    def _federation(self, model: nn.Module, clients: Sequence[Client], test: Client) -> _Federation:
        network = copy.deepcopy(model)
        trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        sphere = None if self.local is None else self.local.sphere
        if sphere is None:
            return _Federation(network, network, trained, None, clients, test)
        head = FixedHead(sphere, network, clients[0][0][:2])
        return _Federation(network, head.network, trained - head.names, head, clients, test)

    def _round(
        self, number_: int, federation: _Federation, weights: Weights, state: State
    ) -> tuple[Weights, State, RoundRecord]:
        head, clients = federation.head, federation.clients
        if head is not None:
            weights = head.start(weights)
        sample = self.sample(number_, len(clients))
        began = time.perf_counter()
        returned, left_out = self._train(number_, federation, weights, state, sample)
        training = time.perf_counter() - began
        if not returned:
            said = "; ".join(f"client {client}: {why}" for client, why in left_out.items())
            raise FloatingPointError(f"at least one client must return a model, got none ({said})")
        began = time.perf_counter()
        local = self.local or Local()
        round_ = Round(number_, weights, returned, local, len(clients), federation.trained, federation.network)
        try:
            outcome = self.server(round_, state)
        except InputError as error:
            raise InputError(f"round {number_}: {error}") from error
        _check_finite(outcome.weights)
        if head is not None:
            merged, data = round_.loaded(outcome.weights), [(one.x, one.y) for one in returned]
            solved, kept, sent = head.calibrate(merged, data, state)
            outcome = Outcome(solved, {**outcome.state, **kept}, outcome.bytes + sent)
            _check_finite(outcome.weights)
        merging = time.perf_counter() - began
        began = time.perf_counter()
        accuracy = _accuracy(round_.loaded(outcome.weights), federation.test)
        norms = {
            n: float(t.double().norm()) for n, t in outcome.weights.items() if n in federation.trained and t.dim() > 1
        }
        record = RoundRecord(
            number_, tuple(sample), left_out, accuracy, outcome.bytes, training, merging,
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
        self, number_: int, federation: _Federation, weights: Weights, state: State, sample: list[int]
    ) -> tuple[list[Returned], dict[int, str]]:
        """What the clients return, in the order of sampling; and why others are left out."""
        local, clients, network = self.local, federation.clients, federation.for_training
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
            odd = _not_finite(found[i])
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


@dataclass(frozen=True, eq=False)
class _Federation:
    """What stays the same from round to round."""

    network: nn.Module
    for_training: nn.Module
    """The network, on the sphere if the head is fixed."""
    trained: frozenset[str]
    head: FixedHead | None
    clients: Sequence[Client]
    test: Client


def _not_finite(weights: Weights) -> str | None:
    """The name of a tensor with NaN or infinity."""
    return next((name for name, t in weights.items() if not is_finite(t)), None)


def _check_finite(weights: Weights) -> None:
    odd = _not_finite(weights)
    if odd is not None:
        raise FloatingPointError(f"the merged model must be finite, got NaN or infinity in {odd!r}")


def _accuracy(model: nn.Module, test: Client) -> float:
    batches = [test[0].split(1000), test[1].split(1000)]
    try:
        return evaluate(model, zip(*batches, strict=True)).accuracy
    except InputError:
        with torch.no_grad():
            if all(is_finite(model(x)) for x in batches[0]):
                raise
        raise FloatingPointError("the merged model must give finite outputs, got NaN or infinity") from None


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
