"""Makes a random stream for every random draw: the split, the initial weights, the training and so on.

A stream is computed from everything that identifies the draw. Two draws have the same stream only if they should.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from maecho.lab import splits
from maecho.lab.experiment import Cell, Experiment


def stream(purpose: str, **identity: Any) -> np.random.SeedSequence:
    """The random stream of one draw: 256 bits of a hash of its purpose and of everything that identifies it."""
    text = json.dumps({"purpose": purpose, **identity}, sort_keys=True)
    return np.random.SeedSequence(np.frombuffer(hashlib.sha256(text.encode()).digest(), "<u4").tolist())


@dataclass(frozen=True)
class Streams:
    """All streams of one cell with one seed.

    All columns of a cell share them: they compare methods on the same clients. Cells share nothing, with one exception:
    cells that split the same data in the same way have the same partition, so that rows which differ in the
    initialisation alone can be compared. What a cell says of the training is left out: rows that differ in it alone
    have the same initial weights and the same order of examples.
    """

    data: str
    network: str
    cell: Cell
    seed: int
    split: str = "dirichlet"

    @classmethod
    def of(cls, experiment: Experiment, cell: Cell, seed: int) -> Streams:
        return cls(experiment.data, experiment.network, experiment.without_training(cell), seed, experiment.split)

    def partition(self) -> np.random.Generator:
        """The stream that divides the examples among clients."""
        sequence = stream("partition", data=self.data, split=splits.identity(self.split, self.cell), seed=self.seed)
        return np.random.default_rng(sequence)

    def initial(self, client: int) -> torch.Generator:
        """The stream of the initial weights: the same for all clients, or one for each if the cell says so."""
        same = self.cell.get("init", "same") == "same"
        return self._torch("initial weights", client=None if same else client)

    def training(self, client: int) -> torch.Generator:
        """The stream for the order of examples in training, and for dropout."""
        return self._torch("training", client=client)

    def batches(self, client: int) -> torch.Generator:
        """The stream for the order of examples when statistics are gathered."""
        return self._torch("batches", client=client)

    def labels(self, client: int) -> torch.Generator:
        """The stream for the random signs of sampled labels."""
        return self._torch("labels", client=client)

    def method(self) -> int:
        """The seed of all methods that draw. Since it is the same, columns that draw the same inputs can share them."""
        return int(self._sequence("method").generate_state(1)[0])

    def _torch(self, purpose: str, **more: Any) -> torch.Generator:
        state = self._sequence(purpose, **more).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(state) >> 1)  # torch takes 63 bits

    def _sequence(self, purpose: str, **more: Any) -> np.random.SeedSequence:
        return stream(purpose, data=self.data, network=self.network, cell=dict(self.cell), seed=self.seed, **more)
