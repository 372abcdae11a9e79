"""The server's half of echo-relay, and the family between it and echo-chain.

The network is fitted stage after stage. For each the server needs totals of two sums over the clients, from real data
(a light round: the merged weights so far go out, sums come back) or from inputs that it draws itself from uploads. Real
data at every stage are echo-relay, at none echo-chain. Only totals are used: no client's own sums or model matter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from maecho._version import __version__
from maecho.echo.fit import Regression, fitted, repaired
from maecho.echo.messages import ONE, Message, add_up, asked, named, sums_of, to_send
from maecho.echo.players import Drawing, Players
from maecho.errors import UploadError
from maecho.network.attention import packed, split
from maecho.network.layers import read
from maecho.network.units import Unit, network
from maecho.options import number
from maecho.progress import track
from maecho.upload import storage as files
from maecho.upload.cohort import Source
from maecho.upload.merged import Merged

Rounds = int | str | Sequence[str]


class RelayServer:
    """Asks, adds up, solves; one stage at a time.

        server = RelayServer(model)
        while not server.done:
            question = server.broadcast()
            server.collect(client.answer(question) for client in clients)
        model.load_state_dict(server.result())

    Args:
        model: a network of the clients' architecture, any weights. Left as it is.
        rounds: where real data are consulted. "all" (the default): at every stage, echo-relay. A number: 1 is
            echo-chain, each further round is one more stage at real data, from the head backwards. Or the names of
            layers. For anything but "all" there must be uploads.
        uploads: of the clients, with moments: what pseudo inputs are drawn from.
        start: a state_dict that was merged before, by echo-chain say. The stages before the first round are taken from
            it instead of being fitted anew at drawn inputs.
        regression: the ridge and the head.
        drawing: of the pseudo inputs.
        prior: a state_dict that the ridge pulls to, in place of the clients' average.
        minimum: a round with fewer answers is refused; it can be asked again.
        checkpoint: a file that holds the last finished stage, for `resume`.
        progress: a progress bar where inputs are drawn: True, False, or None for one on a terminal if it takes long.
    """

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
    ):
        number("minimum", minimum, "a whole number, at least 1", 1, whole=True)
        self._model = model
        self._merged = split(model)
        self._units, self._aliases = network(self._merged), read(self._merged).aliases
        self._rounds = _checked(rounds, self._units)
        self._regression = regression or Regression()
        self._prior = None if prior is None else _loaded(model, prior, "prior")
        self._minimum, self._checkpoint = minimum, None if checkpoint is None else Path(checkpoint)
        self._players, self._progress = None, progress
        if uploads is not None:
            self._players = Players(model, uploads, drawing or Drawing(), self._regression.ridge, progress)
        if self._players is None and rounds != "all":
            raise UploadError(f"rounds={rounds!r} needs uploads with moments to draw inputs from, got none")
        self._stages: list[list[Unit]] | None = None  # not known before the first answers
        self._head: str | None = None
        self._alone = False  # a single client, whose network is what is wanted
        self._finished = 0
        self._taken = 0  # stages that come from `start`
        self._settled: set[str] = set()
        self.clients_heard: list[int] = []
        """How many answered, stage by stage; 0 where inputs were drawn."""
        self.bytes_heard: list[int] = []
        """How large the largest answer was, stage by stage; 0 where inputs were drawn."""
        if start is not None:
            self._begin(start)

    @property
    def done(self) -> bool:
        """Whether every stage is fitted. Stages at drawn inputs are fitted on the way."""
        self._draw()
        return self._stages is not None and self._finished == len(self._stages)

    @property
    def stages(self) -> list[list[str]]:
        """The layers fitted at once, in order; known from the first answers on."""
        return [[unit.name for unit in stage] for stage in self._stages or ()]

    def broadcast(self) -> Message:
        """The question of the next round at real data."""
        if self.done:
            raise UploadError("there must be a stage left to ask for, got a network that is fitted")
        return self._question()

    def collect(self, answers: Iterable[Mapping[str, Tensor]]) -> None:
        """Add up what clients answered, as it comes, and fit the stage. On an error nothing has changed."""
        if self.done:
            raise UploadError("there must be a stage left to fit, got answers for a network that is fitted")
        self._take(answers)

    def result(self) -> Merged:
        """The merged state_dict."""
        if not self.done:
            raise UploadError(
                f"every stage must be fitted, got {self._finished} of {len(self._stages or ()) or 'unknown'}"
            )
        assert self._stages is not None
        of_units = {name for stage in self._stages for unit in stage for name in unit.parameters(self._merged)}
        state = self._merged.state_dict()
        # Under the names of the original: an attention's parts count as fitted together.
        known = of_units | self._aliases.keys()
        marks = packed({n: torch.full(t.shape, float(n in known)) for n, t in state.items()}, self._model)
        merged = Merged(
            {name: tensor.clone() for name, tensor in packed(state, self._model).items()},
            averaged=[name for name, mark in marks.items() if not mark.any()],
        )
        drawn = [] if self._players is None or self._rounds == "all" else [repr(self._players.drawing)]
        merged.recipe = {
            "method": "echo-chain" if self._rounds == 1 else "echo-relay",
            "options": ", ".join([repr(self._regression), *drawn, f"rounds={self._rounds!r}"]),
            "stages": self.stages,
            "taken": self.stages[: self._taken],
            "clients": self.clients_heard,
            "bytes": self.bytes_heard,
            "made_by": f"maecho {__version__}",
        }
        return merged

    def _question(self) -> Message:
        state = self._merged.state_dict()
        message: Message = {"round": torch.tensor(self._finished)}
        if self._stages is None:
            return to_send(message | {"open": ONE})
        for unit in self._stages[self._finished]:
            message[f"unit/{unit.name}"] = ONE
            if unit.norm is not None:
                message[f"join/{unit.name}/{unit.norm}"] = ONE
        if self._head is not None:
            message[f"head/{self._head}"] = ONE
        return to_send(message | {f"weights/{name}": state[name] for name in sorted(self._settled)})

    def _take(self, answers: Iterable[Mapping[str, Tensor]], drawn: bool = False) -> None:
        size = 0

        def weighed() -> Iterator[Mapping[str, Tensor]]:
            nonlocal size
            for answer in answers:
                if isinstance(answer, Mapping):  # what is none is refused by who adds up
                    size = max(size, sum(t.nbytes for t in answer.values() if isinstance(t, Tensor)))
                yield answer

        total = add_up(weighed())
        heard = round(float(total.get("clients", 0)))
        if heard < (1 if drawn else self._minimum):
            raise UploadError(
                f"round {self._finished}: at least {self._minimum} client(s) must answer, got {heard}; ask again"
            )
        examples = total.get("examples")
        if examples is None or examples.numel() != 1 or not float(examples) > 0:
            got = "none" if examples is None else examples.tolist()
            raise UploadError(f"round {self._finished}: answers must say of how many examples they are, got {got}")
        opening, settled = self._stages is None, False
        try:
            if opening:
                self._open(total)
            if not (opening and drawn) or self._is_drawn(0):
                self._fit(total, *((0, 0) if drawn else (heard, size)))
            settled = True
        except UploadError as error:
            raise UploadError(f"round {self._finished}: {error}") from error
        finally:
            if opening and not settled and not self._finished:  # fitted, it may still fail to be written down
                self._stages, self._settled = None, set()

    def _open(self, total: Mapping[str, Tensor]) -> None:
        """From the first answers: how the network runs, and the average of what has no sums."""
        depths = {key.removeprefix("stage/"): int(t) for key, t in total.items() if key.startswith("stage/")}
        names = [[n for n, depth in depths.items() if depth == k] for k in range(max(depths.values(), default=0) + 1)]
        joins = {key: t for key, t in total.items() if key.startswith("join/")}
        stages = [asked({**{f"unit/{n}": ONE for n in stage}, **joins}, self._units) for stage in names]
        plain = {
            key.removeprefix("plain/"): t / total["examples"] if t.is_floating_point() else t
            for key, t in total.items()
            if key.startswith("plain/")
        }
        of_units = {name for stage in stages for unit in stage for name in unit.parameters(self._merged)}
        for name in self._merged.state_dict():
            if name not in of_units | plain.keys() | self._aliases.keys():
                raise UploadError(f"answers must be of the server's network, got none for {name!r}")
        self._load(plain)
        self._stages, self._head = stages, named(total, "head")
        self._alone = round(float(total["clients"])) == 1

    def _begin(self, start: Mapping[str, Tensor]) -> None:
        """What comes before the first stage at real data, as it was merged before."""
        if self._players is None or self._rounds == "all":
            raise UploadError(
                f"start must come with uploads, which tell how the network runs, and with rounds at some layers alone, "
                f"got rounds={self._rounds!r}"
            )
        plan = self._players.plan
        self._stages, self._head = [list(stage) for stage in plan.stages], plan.head
        self._alone = len(self._players) == 1
        while self._taken < len(self._stages) and self._is_drawn(self._taken):
            self._taken += 1
        if self._taken == len(self._stages):
            raise UploadError(f"with a start some stage must be asked for anew, got rounds={self._rounds!r}")
        fitted_anew = [unit for stage in self._stages[self._taken :] for unit in stage]
        left_out = {name for unit in fitted_anew for name in unit.parameters(self._merged)} | self._aliases.keys()
        state = _loaded(self._model, start, "start").state_dict()
        self._load({name: tensor for name, tensor in state.items() if name not in left_out})
        self._finished = self._taken
        self.clients_heard, self.bytes_heard = [0] * self._taken, [0] * self._taken

    def _fit(self, total: Mapping[str, Tensor], heard: int, size: int) -> None:
        assert self._stages is not None
        new: dict[str, Tensor] = {}
        regression = self._regression.plain if self._alone else self._regression
        device = next((p.device for p in self._merged.parameters()), torch.device("cpu"))
        for unit in self._stages[self._finished]:
            sums = sums_of(unit, unit.matrix(self._merged).shape, total, device)
            prior = sums["prior"] / total["examples"].to(device)
            if "noise" in sums:
                sums = repaired(unit, sums, total["examples"].to(device))
            if self._prior is not None:
                prior = unit.matrix(self._prior).to(prior)
            new |= fitted(
                regression, unit, sums, prior, self._merged, float(total["examples"]), unit.name == self._head
            )
        lost = [name for name, tensor in new.items() if not tensor.isfinite().all()]
        if lost:
            raise UploadError(f"the fit must be finite, got NaN or infinity in {lost[0]!r}")
        self._load(new)
        self._finished += 1
        self.clients_heard.append(heard)
        self.bytes_heard.append(size)
        if self._checkpoint is not None:
            self._save(self._checkpoint)

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        state = self._merged.state_dict()
        for name, tensor in tensors.items():
            if name not in state or state[name].shape != tensor.shape:
                raise UploadError(f"answers must be of the server's network, got {name!r} {tuple(tensor.shape)}")
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
        self._settled |= tensors.keys()

    def _is_drawn(self, stage: int) -> bool:
        """Whether the inputs of a stage are drawn. Rounds count from the head backwards."""
        if self._rounds == "all":
            return False
        assert self._stages is not None
        if isinstance(self._rounds, int):
            return stage < len(self._stages) - (self._rounds - 1)
        return not any({unit.name, unit.norm} & set(self._rounds) for unit in self._stages[stage])

    def _save(self, path: Path) -> None:
        """Everything that `resume` needs; the file is whole at any moment."""
        assert self._stages is not None
        joins = {u.name: u.norm for stage in self._stages for u in stage if u.norm is not None}
        about = {
            "stages": self.stages,
            "joins": joins,
            "head": self._head,
            "alone": self._alone,
            "finished": self._finished,
            "settled": sorted(self._settled),
            "heard": self.clients_heard,
            "bytes": self.bytes_heard,
            "made_by": f"maecho {__version__}",
        }
        files.write_tensors(path, "relay", self._merged.state_dict(), about)

    def resume(self, path: str | Path) -> None:
        """Go on from the last finished stage of a server with the same model and options."""
        about = files.read_about(Path(path), "relay")
        try:
            joins = {f"join/{layer}/{norm}": ONE for layer, norm in about["joins"].items()}
            stages = [asked({**{f"unit/{n}": ONE for n in stage}, **joins}, self._units) for stage in about["stages"]]
            tensors = files.read_tensors(Path(path))
            head, alone, finished = about["head"], about["alone"], int(about["finished"])
            heard, sizes = list(about["heard"]), list(about["bytes"])
            self._load({name: tensors[name] for name in about["settled"]})
        except (KeyError, TypeError, ValueError, UploadError) as error:
            raise UploadError(f"{path} must be the checkpoint of a relay of this network, got: {error}") from error
        self._stages, self._head, self._alone = stages, head, alone
        self._finished, self.clients_heard, self.bytes_heard = finished, heard, sizes

    def _draw(self) -> None:
        """Fit all stages that come next at drawn inputs."""
        while self._players is not None and self._rounds != "all":
            known = self._stages is not None
            if known and (self._finished == len(self._stages or ()) or not self._is_drawn(self._finished)):
                return
            question = self._question()
            label = f"echo-chain, stage {self._finished + 1}" + (f" of {len(self._stages)}" if self._stages else "")
            players = track(self._players, label, show=self._progress)
            self._take((client.answer(question) for client in players), drawn=True)


def _checked(rounds: Rounds, units: Mapping[str, Unit]) -> int | str | tuple[str, ...]:
    if rounds == "all" or (isinstance(rounds, int) and not isinstance(rounds, bool) and rounds >= 1):
        return rounds
    if isinstance(rounds, str) or not isinstance(rounds, Iterable) or not rounds:
        raise ValueError(f"rounds must be all, a whole number from 1 on, or names of layers, got {rounds!r}")
    for name in rounds:
        if name not in units:
            raise ValueError(f"rounds must name layers of the network ({', '.join(units)}), got {name!r}")
    return tuple(rounds)


def _loaded(model: nn.Module, state: Mapping[str, Tensor], what: str) -> nn.Module:
    twin = copy.deepcopy(model)
    try:
        twin.load_state_dict(dict(state))
    except RuntimeError as error:
        raise UploadError(f"{what} must be a state_dict of the model, got: {' '.join(str(error).split())}") from error
    return split(twin)
