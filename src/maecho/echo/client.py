"""The client's half of echo-relay: a trained model and its data, which answer the server's questions.

The server asks for the sums of one stage of the network, and sends the merged weights of all stages before it. The
client passes over its data once, forward only, and answers. No answer depends on earlier ones, so it may miss any of
them. What it has computed for a stage it keeps for the next, if memory allows. (With privacy it remembers what it has
released so far.)
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.echo.ledger import PrivacyLedger
from maecho.echo.messages import Answer, Opening, Question, units_named
from maecho.echo.observation import observe
from maecho.echo.replay.replay import Replay
from maecho.echo.totals import totals_of
from maecho.echo.wire import own_memory
from maecho.errors import InputError, text_of
from maecho.network.attention import slow_path
from maecho.network.batches.inputs import examples, subset
from maecho.network.batches.reading import Read, Reader, Reading
from maecho.network.forward import call, evaluating
from maecho.network.layers import read
from maecho.network.packed.twin import compared, twin_of
from maecho.network.plain import plain as unwrapped
from maecho.network.stages import Plan, plan
from maecho.network.units import Unit, network
from maecho.options import number
from maecho.privacy import Privacy


class RelayClient:
    """Answers for one client.

    Args:
        model: the client's trained network. It is not changed.
        batches: the client's data. They are read once in each round, so they must be a list, a DataLoader or the like.
            A generator can be read only once.
        client: the client's name, for errors.
        plan: the stages of the network, if they are known already.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        privacy: noise on all sums. Each answer is one release. The client's weights are not covered.
        released: with privacy, how often the same data were released before. An upload is one release.
        minimum: so many examples must carry all that is sent. An input of a unit is left out if one example makes more
            than 1/minimum of its Σ h², and a class with fewer examples is left out; see docs/echo.md for what this does
            not stop. With privacy it is refused, since noise protects single examples, and leaving out would not.
        inputs, labels, outputs: functions that find the inputs and the labels in a batch, and the scores in what the
            model returns, if the usual rules do not (docs/batches.md).
        merged: a network of the same architecture to load merged weights into. By default a copy of the model.
        replay: keeps what was computed at earlier stages, up to 1 GiB by default. Nothing depends on it but time.
    """

    @devices.outside_inference
    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        client: str = "client",
        *,
        plan: Plan | None = None,
        progress: bool | None = None,
        privacy: Privacy | None = None,
        released: int = 0,
        minimum: int | None = None,
        inputs: Read | None = None,
        labels: Read | None = None,
        outputs: Read | None = None,
        merged: nn.Module | None = None,
        replay: Replay | None = None,
    ):
        if isinstance(batches, Iterator):
            raise InputError(
                f"{client}: the batches must be something that can be gone through once a round, such as a list or a "
                f"DataLoader, got a {type(batches).__name__} that is used up after one"
            )
        self.client, self._batches, self._progress = client, batches, progress
        model = unwrapped(model, f"{client}: the model")
        try:
            self._model, self._twin = model, twin_of(model)
            self._own = self._twin.network
            self._reader = Reader(model, client, Reading(inputs, labels, outputs))
        except InputError as error:
            raise InputError(f"{client}: {error}") from error
        self._merged = copy.deepcopy(self._own) if merged is None else merged
        self._replay = replay or Replay()
        self._settled: frozenset[str] = frozenset()
        self._aliases = read(self._own).aliases
        self._plan = plan
        if minimum is not None:
            number("minimum", minimum, "a whole number, at least 1", 1, whole=True)
            if privacy is not None:
                raise InputError(
                    f"{client}: a minimum must come without privacy, since what is left out depends on the data "
                    f"without noise, got minimum={minimum} and {privacy!r}"
                )
        self._minimum = minimum
        self.withheld: dict[str, int] = {}
        """How many inputs of each unit were left out of answers, since too few examples carry them."""
        self._ledger = None if privacy is None else PrivacyLedger(privacy, client, released)

    @property
    def released(self) -> int:
        """How often noisy sums were released."""
        return 0 if self._ledger is None else self._ledger.released

    def spent(self) -> tuple[float, float]:
        """(ε, δ) of everything that was released so far."""
        if self._ledger is None:
            raise InputError(f"{self.client}: what is spent must be counted with privacy, got a client without")
        return self._ledger.privacy.epsilon(self.released), self._ledger.privacy.delta

    @devices.outside_inference
    def answer(self, question: Question | Mapping[str, Tensor]) -> Answer:
        """Compute the answer to a question, which may be given in its wire form."""
        try:
            question = Question.read(question)
        except InputError as error:
            raise InputError(f"{self.client}: {error}") from error
        self._load(question.weights)
        if question.opening:
            return self._open()
        try:
            units = units_named(question.units, self._units)
        except InputError as error:
            raise InputError(f"{self.client}: {error}") from error
        return self._sums(units, question.head)

    @functools.cached_property
    def _units(self) -> dict[str, Unit]:
        return network(self._own)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        state, before = self._own.state_dict(), self._merged.state_dict()
        changed = not self._settled <= weights.keys()
        for name, tensor in weights.items():
            if name not in state or state[name].shape != tensor.shape:
                expected = tuple(state[name].shape) if name in state else "no such weight"
                raise InputError(
                    f"{self.client}: the server's {name!r} must be of this client's network ({expected}), got "
                    f"{tuple(tensor.shape)}"
                )
            state[name] = tensor
            changed = changed or (name in self._settled and not torch.equal(before[name], tensor.to(before[name])))
        state |= {alias: state[kept] for alias, kept in self._aliases.items()}
        self._merged.load_state_dict(state)
        self._settled = frozenset(weights)
        self._replay.begin(self._own, self._units.values(), self._settled, changed)

    def _open(self) -> Answer:
        """Answer the first question: how the network runs, the weights that are only averaged, and the sums of the
        first stage, which needs nothing but the inputs."""
        stages = self.plan.stages
        answer = self._sums(stages[0] if stages else (), self.plan.head)
        of_units = {name for stage in stages for unit in stage for name in unit.parameters(self._own)}
        plain = {
            name: own_memory(_times(tensor, answer.examples))
            for name, tensor in self._own.state_dict().items()
            if name not in of_units and name not in self._aliases
        }
        opening = Opening(
            {unit.name: k for k, stage in enumerate(stages) for unit in stage},
            {unit.name: unit.norm for stage in stages for unit in stage if unit.norm is not None},
            self.plan.head,
            plain,
        )
        return replace(answer, opening=opening)

    @property
    def plan(self) -> Plan:
        """The stages of this client's network, found on its first batch."""
        if self._plan is None:
            inputs = (self._reader.read(batch)[0] for batch in self._batches)
            first = next((x for x in inputs if examples(x)), None)
            if first is None:
                raise InputError(f"{self.client}: the batches must hold at least one example, got none")
            try:
                self._check_twin(first)
                self._plan = plan(self._own, first, self._reader.reading.outputs)
            except InputError as error:
                raise InputError(f"{self.client}: {error}") from error
            except (RuntimeError, TypeError) as error:
                raise InputError(
                    f"{self.client}: the model must take its own batches, got an error: {text_of(error)}"
                ) from error
            if self._plan.averaged:
                warnings.warn(
                    f"{self.client}: these are averaged, since they are no matrices that can be fitted: "
                    f"{', '.join(map(self._twin.in_words_of_the_model, self._plan.averaged))}",
                    stacklevel=3,
                )
            if self._plan.idle:
                warnings.warn(
                    f"{self.client}: these are averaged, since no module of that name ran on the first batch: "
                    f"{', '.join(self._plan.idle)}; let forward() call the module itself",
                    stacklevel=3,
                )
        return self._plan

    def _check_twin(self, inputs: Any) -> None:
        """Raise InputError if a module that was split computes something else than its parts do."""
        few = subset(inputs, slice(2), examples(inputs))
        with torch.no_grad(), slow_path(), evaluating(self._model), compared(self._twin, self._model) as wrong:
            call(self._own, few, devices.of(self._own), self._reader.reading.outputs)
        for name in sorted(wrong):
            kind = type(self._model.get_submodule(name)).__name__
            raise InputError(
                f"{name!r} must compute what torch's {kind} does to be fitted by parts, got something else"
            )

    def _layers_with_labels(self, units: Sequence[Unit], head: str | None) -> list[str]:
        """The names of the units that get sums by class, too.

        These are all units after the first stage: there, sums by class would be class means of raw inputs. A head in
        the first stage gets them all the same, since there is no other layer. With privacy only the head gets them,
        since fewer sums need less noise each.
        """
        if self._ledger is not None:
            return [unit.name for unit in units if unit.name == head]
        first = next((stage for stage in self.plan.stages if stage), ())
        raw = {unit.name for unit in first if unit.name != head}
        return [] if head is None else [unit.name for unit in units if unit.name not in raw]

    def _sums(self, units: Sequence[Unit], head: str | None) -> Answer:
        ledger = self._ledger
        if ledger is not None:
            ledger.check_allowed()
            ledger.check_network(self._own, (self._reader.read(batch)[0] for batch in self._batches))
        observed = observe(
            self._own,
            self._merged,
            units,
            self._batches,
            self.client,
            layers_with_labels=self._layers_with_labels(units, head),
            classes=0 if head is None else self._classes(head),
            calls=self.plan.calls,
            reader=self._reader,
            limit=None if ledger is None else ledger.privacy.factor,
            minimum=self._minimum,
            progress=self._progress,
            replay=self._replay,
        )
        self._tell(observed.withheld, units)
        examples, sums = float(observed.examples), observed.units
        if ledger is not None:
            diagonal = {unit.name for unit in units if unit.layer.one_hot}
            examples, sums = ledger.release(observed.examples, sums, diagonal)
        totals = [totals_of(unit, sums[unit.name], unit.matrix(self._own) * examples) for unit in units]
        one = torch.ones((), dtype=torch.float64)
        return Answer(one, torch.tensor(examples, dtype=torch.float64), tuple(totals))

    def _tell(self, withheld: Mapping[str, int], units: Sequence[Unit]) -> None:
        self.withheld |= withheld
        for unit in units:
            if unit.name in withheld:
                groups, _, d = unit.layer.shape(self._own.state_dict())
                self._reader.lost(
                    f"{withheld[unit.name]} of {groups * d} inputs of {unit.name!r} are not in the answer, since fewer "
                    f"than {self._minimum} examples carry them; a server that asks honestly loses little by that"
                )

    def _classes(self, head: str) -> int:
        units = self._units
        if head not in units:
            raise InputError(f"{self.client}: the server's last layer is {head!r}, one that this network does not have")
        return units[head].layer.shape(self._own.state_dict())[1]


def _times(tensor: Tensor, examples: Tensor) -> Tensor:
    """A weight times the number of examples, or a counter. Of a complex weight, real and imaginary parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double() * examples if tensor.is_floating_point() else tensor
