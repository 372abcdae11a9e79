"""Clients played by the server: their weights, and inputs drawn from what they told of theirs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from maecho.aggregation.cohort import Cohort, Source
from maecho.aggregation.options import number
from maecho.pseudo import PseudoInputs, seed_for
from maecho.respondent import RelayClient
from maecho.units import Plan


@dataclass(frozen=True)
class Drawing:
    """How pseudo inputs are drawn from uploads.

    Args:
        draws: in all, shared out by examples.
        chunk: held at a time.
        seed: of the draws.
    """

    draws: int = 20_000
    chunk: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        number("draws", self.draws, "a whole number, at least 1", 1, whole=True)
        number("chunk", self.chunk, "a whole number, at least 1", 1, whole=True)
        number("seed", self.seed, "a whole number, at least 0", 0, whole=True)


class Players:
    """One respondent for every upload, made when its turn comes; the same each time."""

    def __init__(self, model: nn.Module, uploads: Iterable[Source], drawing: Drawing):
        self._cohort = uploads if isinstance(uploads, Cohort) else Cohort(uploads, {"moments"}, "echo-chain")
        self._model, self._drawing = copy.deepcopy(model), drawing
        self._plan: Plan | None = None

    def __iter__(self) -> Iterator[RelayClient]:
        like = next((p for p in self._model.parameters()), torch.zeros(()))
        everyone = sum(self._cohort.examples)
        for upload in self._cohort:
            assert upload.moments is not None
            self._model.load_state_dict(upload.state_dict())
            inputs = PseudoInputs(
                upload.moments,
                round(self._drawing.draws * upload.examples / everyone),
                self._drawing.chunk,
                seed_for(self._drawing.seed, upload.client),
                like.dtype,
            )
            client = RelayClient(self._model, inputs, upload.client, plan=self._plan, progress=False)
            self._plan = client.plan
            yield client
