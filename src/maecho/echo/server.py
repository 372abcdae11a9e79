"""The server's half of echo-relay, and of all methods between it and echo-chain.

The server fits the network stage after stage. For each stage it needs the total of the clients' sums. In a light round
the sums come from real data: the server sends the merged weights so far, and clients send sums back. Otherwise the
server computes them itself, on inputs that it draws from uploads. With real data at every stage this is echo-relay,
with real data at no stage it is echo-chain. The server uses totals alone, never a single client's sums or model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor, nn

from maecho import devices
from maecho.echo import rounds as schedule
from maecho.echo.fit import Regression
from maecho.echo.merging import MergedNetwork
from maecho.echo.messages import Answer, Opening, Question, add_up
from maecho.echo.rounds import Rounds
from maecho.echo.simulated import Drawing, SimulatedClients
from maecho.echo.state import (
    DRAWN,
    REAL,
    START,
    FittedStage,
    RelayState,
    not_of_this_network,
    read_checkpoint,
    write_checkpoint,
)
from maecho.echo.wire import own_memory
from maecho.errors import InputError
from maecho.network.batches.reading import Read
from maecho.options import number
from maecho.progress import track
from maecho.upload.cohort import Source
from maecho.upload.merged import Merged, make_recipe

__all__ = ["RelayServer", "Rounds"]


class RelayServer:
    """Asks clients, adds up their answers, and solves, one stage after the other.

        server = RelayServer(model)
        while not server.done:
            question = server.broadcast()
            server.collect(client.answer(question) for client in clients)
        model.load_state_dict(server.result())

    Args:
        model: a network of the clients' architecture, with any weights. It is not changed.
        rounds: where real data are asked. "all" (the default) asks at every stage, which is echo-relay. The number 1 is
            echo-chain, and each further round is one more stage at real data, from the head backwards. Names of layers
            ask at the stages of these layers. Anything but "all" needs uploads.
        uploads: the clients' uploads, with moments. Inputs are drawn from them.
        start: a state_dict that was merged before, for example by echo-chain. The stages before the first round are
            taken from it, and not fitted again to drawn inputs.
        regression: the options of the fit.
        drawing: the options for drawing inputs.
        prior: a state_dict that the ridge pulls to, instead of the clients' average.
        minimum: a round with fewer answers is refused. It can be asked again.
        checkpoint: a file that keeps the last finished stage, for `resume`.
        progress: a progress bar while inputs are drawn: True, False, or None for one on a terminal if it takes long.
        outputs: finds the scores in what the network returns for drawn inputs, if the usual rules do not.
    """

    @devices.outside_inference
    def __init__(
        self,
        model: nn.Module,
        *,
        rounds: Rounds = "all",
        uploads: Iterable[Source] | None = None,
        start: Mapping[str, Tensor] | None = None,
        regression: Regression | None = None,
        drawing: Drawing | None = None,
        prior: Mapping[str, Tensor] | None = None,
        minimum: int = 1,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
        outputs: Read | None = None,
    ):
        number("minimum", minimum, "a whole number, at least 1", 1, whole=True)
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._merged = MergedNetwork(model, prior)
        self._rounds = schedule.checked(rounds, self._merged.units)
        schedule.check_used(self._rounds, uploads=uploads, start=start, drawing=drawing)
        self._regression = regression or Regression()
        self._minimum, self._checkpoint = minimum, None if checkpoint is None else Path(checkpoint)
        self._progress = progress
        self._simulated: SimulatedClients | None = None
        if uploads is not None:
            ridge = self._regression.ridge
            self._simulated = SimulatedClients(model, uploads, drawing or Drawing(), ridge, progress, outputs)
        self._state: RelayState | None = None  # known once the first answers came
        if start is not None:
            self._load_start(start)

    @property
    def done(self) -> bool:
        """Whether no question is left to ask. Stages at drawn inputs may be left: `result` fits them."""
        if self._rounds == 1:
            return True
        state = self._state
        return state is not None and not any(self._asks(state, k) for k in range(state.finished, len(state.stages)))

    @property
    def stages(self) -> list[list[str]]:
        """The layers of every stage, in order of execution. They are known once the first answers came."""
        return [] if self._state is None else self._state.layers

    @property
    def clients_answered(self) -> list[int]:
        """How many clients answered at each stage. 0 for stages at drawn inputs."""
        return [] if self._state is None else [stage.clients for stage in self._state.fitted]

    @property
    def answer_bytes(self) -> list[int]:
        """The size of the largest answer at each stage. 0 for stages at drawn inputs."""
        return [] if self._state is None else [stage.bytes for stage in self._state.fitted]

    @devices.outside_inference
    def broadcast(self) -> Question:
        """The question of the next round. Stages at drawn inputs that come before it are fitted first."""
        if not self.done:
            self.fit_drawn()
        if self.done:
            raise InputError(f"there must be a stage left to ask for, got {self._left()}")
        return self._question()

    @devices.outside_inference
    def collect(self, answers: Iterable[Answer | Mapping[str, Tensor]]) -> None:
        """Add up the answers, each when it comes, and fit the stage that was asked for. After an error the stage is as
        it was before, and can be asked for again.

        Args:
            answers: the clients' answers, as Answer objects or in their wire forms. It may also be one total of many
                clients.
        """
        if not self.done:
            self.fit_drawn()
        if self.done:
            raise InputError(f"there must be a stage left to fit, got answers for {self._left()}")
        self._fit(answers, REAL)

    @devices.outside_inference
    def fit_drawn(self) -> None:
        """Fit all stages at drawn inputs that come before the next round."""
        while self._simulated is not None:
            state = self._state
            if state is not None and (state.complete or self._asks(state, state.finished)):
                return
            question = self._question()
            label = f"echo-chain, stage {question.round + 1}" + ("" if state is None else f" of {len(state.stages)}")
            clients = track(self._simulated, label, show=self._progress)
            self._fit((client.answer(question) for client in clients), DRAWN)

    @devices.outside_inference
    def result(self) -> Merged:
        """The merged model. Stages at drawn inputs that are left are fitted first."""
        if self.done:
            self.fit_drawn()
        state = self._state
        if state is None or not state.complete:
            finished, count = (0, "unknown") if state is None else (state.finished, len(state.stages))
            raise InputError(f"every stage must be fitted, got {finished} of {count}")
        merged = self._merged.result(state.stages)
        simulated = self._simulated
        drawn = [] if simulated is None else [repr(simulated.drawing)]
        merged.recipe = make_recipe(
            "echo-chain" if self._rounds == 1 else "echo-relay",
            ", ".join([repr(self._regression), *drawn, f"rounds={self._rounds!r}"]),
            max([0 if simulated is None else len(simulated), *self.clients_answered]),
            self._seconds,
            rounds=[asdict(stage) for stage in state.fitted],
            upload_bytes=0 if simulated is None else simulated.upload_bytes,
        )
        return merged

    @devices.outside_inference
    def resume(self, path: str | Path) -> None:
        """Go on from the last finished stage of a server with the same model and options."""
        path = Path(path)
        state, weights = read_checkpoint(path, self._merged.units)
        try:
            schedule.check_run(self._rounds, state.stages)
            self._merged.load(weights)
        except InputError as error:
            raise not_of_this_network(path, error) from error
        self._state = state

    def _asks(self, state: RelayState, stage: int) -> bool:
        return schedule.asks_clients(self._rounds, state.stages, stage)

    def _left(self) -> str:
        """Says in words why no question is left."""
        fitted = self._state is not None and self._state.complete
        return "a network that is fitted" if fitted else "a network whose other stages are at drawn inputs"

    def _question(self) -> Question:
        state = self._state
        if state is None:
            return Question(opening=True)
        weights = self._merged.network.state_dict()
        return Question(
            state.finished,
            units={unit.name: unit.norm for unit in state.stages[state.finished]},
            head=state.head,
            weights={name: own_memory(weights[name]) for name in sorted(state.settled)},
        )

    def _load_start(self, start: Mapping[str, Tensor]) -> None:
        """Load all stages before the first round from a model that was merged before."""
        assert self._simulated is not None
        plan = self._simulated.plan
        schedule.check_run(self._rounds, plan.stages)
        numbers = range(len(plan.stages))
        first = next((k for k in numbers if schedule.asks_clients(self._rounds, plan.stages, k)), None)
        if first is None:
            raise InputError(f"with a start some stage must be asked for anew, got rounds={self._rounds!r}")
        settled = self._merged.load_model(start, without=plan.stages[first:])
        fitted = tuple(FittedStage([unit.name for unit in stage], START) for stage in plan.stages[:first])
        self._state = RelayState(plan.stages, plan.head, len(self._simulated) == 1, settled, fitted)

    def _fit(self, answers: Iterable[Answer | Mapping[str, Tensor]], inputs: str) -> None:
        """Fit the next stage to the total of these answers."""
        state, stage = self._state, 0 if self._state is None else self._state.finished
        try:
            total, size = add_up(answers)
            clients = 0 if total is None else round(float(total.clients))
            minimum = self._minimum if inputs == REAL else 1
            if total is None or clients < minimum:
                raise InputError(f"at least {minimum} client(s) must answer, got {clients}; ask again")
            if not float(total.examples) > 0:
                raise InputError(f"answers must say of how many examples they are, got {float(total.examples)}")
            if state is None:
                state = self._merged.open(total.opening or Opening(), total)
                schedule.check_run(self._rounds, state.stages)
            if inputs == REAL or not self._asks(state, stage):
                regression = self._regression.plain if state.single_client else self._regression
                settled = self._merged.fit(state.stages[stage], total, regression, state.head)
                fitted = FittedStage(state.layers[stage], inputs)
                if inputs == REAL:
                    fitted = replace(fitted, clients=clients, bytes=size)
                state = state.after(fitted, settled)
        except InputError as error:
            raise InputError(f"round {stage}: {error}") from error
        self._state, self._seconds = state, time.perf_counter() - self._began
        if self._checkpoint is not None and state.finished > stage:
            write_checkpoint(self._checkpoint, state, self._merged.network.state_dict())
