"""The client's half of echo-relay: a trained model and its data that answer what the server asks.

The server asks for the sums of one stage of the network, given the merged weights of all before it; the client goes
through its data once, forward only, and answers. It remembers nothing from one message to the next, so it may miss any
(with privacy: nothing but what it has released so far).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maecho.echo.ledger import Guard
from maecho.echo.messages import ONE, Message, asked, folded, named, to_send
from maecho.echo.observation import observe
from maecho.errors import UploadError
from maecho.network.attention import split
from maecho.network.forward import examples, parts
from maecho.network.layers import read
from maecho.network.stages import Plan, plan
from maecho.network.units import Unit, network
from maecho.privacy import Privacy


class RelayClient:
    """Answers for one client.

    Args:
        model: its trained network. Left as it is.
        batches: its data, gone through once a round: something that can be gone through again, not a generator.
        client: its name, for messages.
        plan: the stages of the network, where they are known already.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        privacy: noise on all sums; each answer is one release. Its weights are not covered.
        released: with privacy, what was released of the same data before, such as an upload.
    """

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
    ):
        if isinstance(batches, Iterator):
            raise UploadError(
                f"{client}: the batches must be something that can be gone through once a round, such as a list or a "
                f"DataLoader, got a {type(batches).__name__} that is used up after one"
            )
        self.client, self._batches, self._progress = client, batches, progress
        try:
            self._own = split(model)
        except UploadError as error:
            raise UploadError(f"{client}: {error}") from error
        self._merged = copy.deepcopy(self._own)
        self._aliases = read(self._own).aliases
        self._plan = plan
        self._guard = None if privacy is None else Guard(privacy, client, released)

    @property
    def released(self) -> int:
        """How often noisy sums were given out."""
        return 0 if self._guard is None else self._guard.released

    def spent(self) -> tuple[float, float]:
        """(ε, δ) of everything that was released so far."""
        if self._guard is None:
            raise UploadError(f"{self.client}: what is spent must be counted with privacy, got a client without")
        return self._guard.privacy.epsilon(self.released), self._guard.privacy.delta

    def answer(self, message: Mapping[str, Tensor]) -> Message:
        """What the data say to the server's question."""
        self._load(message)
        if "open" in message:
            return to_send(self._open())
        try:
            units = asked(message, network(self._own))
        except UploadError as error:
            raise UploadError(f"{self.client}: {error}") from error
        return to_send(self._sums(units, named(message, "head")))

    def _load(self, message: Mapping[str, Tensor]) -> None:
        state = self._own.state_dict()
        for key, tensor in message.items():
            if not key.startswith("weights/"):
                continue
            name = key.removeprefix("weights/")
            if name not in state or state[name].shape != tensor.shape:
                expected = tuple(state[name].shape) if name in state else "no such weight"
                raise UploadError(
                    f"{self.client}: the server's {name!r} must be of this client's network ({expected}), got "
                    f"{tuple(tensor.shape)}"
                )
            state[name] = tensor
        state |= {alias: state[kept] for alias, kept in self._aliases.items()}
        self._merged.load_state_dict(state)

    def _open(self) -> Message:
        """How the network runs, what is averaged, and the sums of the stage that needs nothing but the inputs."""
        stages = self.plan.stages
        out: Message = {f"stage/{u.name}": torch.tensor(k) for k, stage in enumerate(stages) for u in stage}
        out |= {f"join/{u.name}/{u.norm}": ONE for stage in stages for u in stage if u.norm is not None}
        if self.plan.head is not None:
            out[f"head/{self.plan.head}"] = ONE
        sums = self._sums(stages[0] if stages else (), self.plan.head)
        of_units = {name for stage in stages for unit in stage for name in unit.parameters(self._own)}
        for name, tensor in self._own.state_dict().items():
            if name not in of_units and name not in self._aliases:
                weighted = tensor.double() * sums["examples"] if tensor.is_floating_point() else tensor
                out[f"plain/{name}"] = weighted
        return out | sums

    @property
    def plan(self) -> Plan:
        """The stages of this client's network, found on its first batch."""
        if self._plan is None:
            inputs = (parts(batch, self.client)[0] for batch in self._batches)
            first = next((x for x in inputs if examples(x)), None)
            if first is None:
                raise UploadError(f"{self.client}: the batches must hold at least one example, got none")
            try:
                self._plan = plan(self._own, first)
            except UploadError as error:
                raise UploadError(f"{self.client}: {error}") from error
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise UploadError(
                    f"{self.client}: the model must take its own batches, got an error: {reason}"
                ) from error
        return self._plan

    def _told(self, units: Sequence[Unit], head: str | None) -> list[str]:
        """Which also sum by label. Where raw inputs come in, only a head: there is nothing but it. With privacy, too:
        the fewer sums, the less noise on each."""
        if self._guard is not None:
            return [unit.name for unit in units if unit.name == head]
        first = next((stage for stage in self.plan.stages if stage), ())
        raw = {unit.name for unit in first if unit.name != head}
        return [] if head is None else [unit.name for unit in units if unit.name not in raw]

    def _sums(self, units: Sequence[Unit], head: str | None) -> Message:
        guard = self._guard
        if guard is not None:
            guard.permit()
            guard.check(self._own, self._batches)
        observed = observe(
            self._own,
            self._merged,
            units,
            self._batches,
            self.client,
            told=self._told(units, head),
            classes=0 if head is None else self._classes(head),
            calls=self.plan.calls,
            limit=None if guard is None else guard.privacy.factor,
            progress=self._progress,
        )
        count, sums = float(observed.examples), {name: found.tensors() for name, found in observed.units.items()}
        if guard is not None:
            count, sums = guard.release(observed.examples, sums)
        out: Message = {"clients": ONE.double(), "examples": torch.tensor(count, dtype=torch.float64)}
        for unit in units:
            found = sums[unit.name]
            found |= {"gram": folded(found["gram"]), "prior": unit.matrix(self._own) * count}
            out |= {f"sum/{unit.name}/{part}": tensor for part, tensor in found.items()}
        return out

    def _classes(self, head: str) -> int:
        units = network(self._own)
        if head not in units:
            raise UploadError(
                f"{self.client}: the server's last layer is {head!r}, one that this network does not have"
            )
        return units[head].layer.shape(self._own.state_dict())[1]
