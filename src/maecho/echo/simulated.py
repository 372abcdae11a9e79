"""Simulates clients on the server: each has a client's own weights, and inputs drawn from the client's upload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.echo.client import RelayClient
from maecho.echo.messages import Answer
from maecho.echo.replay.kept import Budget
from maecho.echo.replay.replay import Replay
from maecho.network.batches.reading import Read, Reader, Reading
from maecho.network.packed.twin import copied
from maecho.network.stages import Plan
from maecho.network.units import Unit
from maecho.options import number, one_of
from maecho.synthesis.correction import Correction
from maecho.synthesis.pseudo import NOISES, Drawn, Noise, PseudoInputs, seed_for
from maecho.upload.cohort import Cohort, Source

MAP_MEMORY = 2**30
"""If the maps M of all clients (see Correction) fit into so many bytes, they are kept from stage to stage. If not, each
is fitted anew in every stage."""


@dataclass(frozen=True)
class Drawing:
    """The options for drawing inputs from uploads.

    Args:
        draws: how many inputs are drawn for all clients together. A client's part follows from its examples.
        chunk: how many inputs are in memory at a time.
        seed: the seed of the draws.
        features: whether to correct the features of drawn inputs, for uploads that have features; see Correction.
        noise: "leaves" gives images edges, "gaussian" does not; see synthesis/leaves.py.
    """

    draws: int = 20_000
    chunk: int = 1000
    seed: int = 0
    features: bool = True
    noise: Noise = "leaves"

    def __post_init__(self) -> None:
        number("draws", self.draws, "a whole number, at least 1", 1, whole=True)
        number("chunk", self.chunk, "a whole number, at least 1", 1, whole=True)
        number("seed", self.seed, "a whole number, at least 0", 0, whole=True)
        one_of("noise", self.noise, NOISES)

    @property
    def needs(self) -> frozenset[str]:
        """The statistics that inputs are drawn from."""
        return frozenset({"moments"})

    @property
    def uses(self) -> frozenset[str]:
        """Optional statistics. They are read if an upload has them."""
        return frozenset({"features"} if self.features else ())


class SimulatedClient(RelayClient):
    """Answers in the place of a client, with the client's model and with inputs drawn to look like its own."""

    def __init__(
        self,
        model: nn.Module,
        inputs: PseudoInputs | Drawn,
        client: str,
        plan: Plan | None,
        correction: Correction | None,
        progress: bool | None,
        outputs: Read | None = None,
        merged: nn.Module | None = None,
        replay: Replay | None = None,
    ):
        batches = inputs if correction is None else correction
        super().__init__(model, batches, client, plan=plan, progress=progress, merged=merged, replay=replay)
        # Labels of an upload are classes, or it is damaged.
        self._reader = Reader(model, client, Reading(outputs=outputs), strict=True)
        self._correction = correction

    @property
    def merged_network(self) -> nn.Module:
        """The network that merged weights are loaded into. Several clients can share one."""
        return self._merged

    @property
    def feature_map(self) -> Tensor | None:
        """The map M of the correction, once it is fitted."""
        return None if self._correction is None else self._correction.feature_map

    def forget_map(self) -> None:
        """Fit M anew at the next stage."""
        if self._correction is not None:
            self._correction.feature_map = None

    def _sums(self, units: Sequence[Unit], head: str | None) -> Answer:
        if self._correction is None or not self._all_behind(self._correction.layer, units):
            return super()._sums(units, head)
        with self._correction.applied(self._own, self._merged):
            return super()._sums(units, head)

    def _all_behind(self, layer: str, units: Sequence[Unit]) -> bool:
        """Whether all units are at the layer or after it."""
        depths = {module: k for k, stage in enumerate(self.plan.stages) for unit in stage for module in unit.modules}
        return all(depths[unit.modules[0]] >= depths[layer] for unit in units)


class SimulatedClients:
    """Makes one simulated client for every upload when its turn comes. It is the same in every pass."""

    def __init__(
        self,
        model: nn.Module,
        uploads: Iterable[Source],
        drawing: Drawing,
        ridge: float,
        progress: bool | None = None,
        outputs: Read | None = None,
    ):
        if not isinstance(uploads, Cohort):
            # Uploads are read to the device of the network, since inputs are drawn there.
            device = next((p.device for p in model.parameters()), None)
            uploads = Cohort(uploads, drawing.needs, "echo-chain", device, drawing.uses)
        self._cohort = uploads
        self.drawing = drawing
        self._model, self._ridge, self._progress = copied(model), ridge, progress
        self._outputs = outputs
        self._plan: Plan | None = None
        self._feature_maps: dict[str, Tensor] = {}
        self._budget = Budget()
        self._clients: dict[int, SimulatedClient] = {}
        self._merged: nn.Module | None = None

    def __len__(self) -> int:
        return len(self._cohort)

    @property
    def upload_bytes(self) -> int:
        """The size of the largest upload: its weights, and the statistics that inputs are drawn from."""
        return self._cohort.upload_bytes

    @property
    def plan(self) -> Plan:
        """The stages of the network."""
        return self._plan or next(iter(self)).plan

    def __iter__(self) -> Iterator[SimulatedClient]:
        """The clients, one after the other. Those that fit into memory are kept from pass to pass."""
        for at in range(len(self._cohort)):
            client = self._clients.get(at) or self._made(at)
            self._plan = client.plan
            yield client
            feature_map = client.feature_map
            if feature_map is not None and feature_map.nbytes * len(self._cohort) <= MAP_MEMORY:
                self._feature_maps[client.client] = feature_map
            else:
                client.forget_map()

    def _made(self, at: int) -> SimulatedClient:
        # A network of several dtypes casts inside, so it takes float32.
        dtypes = {p.dtype for p in self._model.parameters() if p.is_floating_point()} or {torch.float32}
        dtype = dtypes.pop() if len(dtypes) == 1 else devices.float32_or_finer(self._model.parameters())
        upload = self._cohort[at]
        self._model.load_state_dict(upload.state_dict())
        inputs = PseudoInputs(
            upload.statistics["moments"],
            round(self.drawing.draws * upload.examples / sum(self._cohort.examples)),
            self.drawing.chunk,
            seed_for(self.drawing.seed, upload.client),
            dtype,
            self.drawing.noise,
        )
        keep = self._budget.take(upload.bytes() + inputs.bytes)
        drawn = Drawn(inputs) if keep else inputs
        features = upload.statistics.get("features", {}) if self.drawing.features else {}
        correction = None
        for layer, found in features.items():
            own = seed_for(self.drawing.seed, f"features of {upload.client}")
            known = self._feature_maps.get(upload.client)
            correction = Correction(inputs, layer, found, own, self._ridge, known, self._progress, drawn)
        client = SimulatedClient(
            self._model,
            drawn,
            upload.client,
            self._plan,
            correction,
            self._progress,
            self._outputs,
            self._merged,
            Replay(self._budget),
        )
        self._merged = client.merged_network
        if keep:
            self._clients[at] = client
        return client
