"""Fusion by optimal transport, alone and before MA-Echo.

`ot` brings all clients into the order of one by transport of their neurons, then averages (Singh and Jaggi, 2020).
`ma-echo+ot` does the same, with the statistics too, then runs MA-Echo (the paper's section on neuron matching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from maecho.aggregation.average import FedAvg
from maecho.aggregation.ma_echo import MAEcho
from maecho.aggregation.method import Guide
from maecho.alignment.transport import Alignment
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class OT(Alignment):
    """Align, then average.

    It has the options of `Alignment`, and these:

    Args:
        weighting: "uniform" as in the paper, or "examples" to weight each client by its number of examples.
        head: "average" averages the last layer like the rest. "class-aware" does it as the MA-Echo release does.
    """

    guide: ClassVar[Guide] = Guide(
        does=(
            "brings the neurons of all clients into one client's order by optimal transport, then averages; it "
            "compares weights, or activations on drawn inputs"
        ),
        uploads="neuron spaces (found by tracing); for activations moments and `model=`",
        different="with similar data",
        convolutions="yes",
        residual="yes",
        cost="seconds; memory of all uploads",
        when="different initialisations and similar data",
    )

    weighting: Literal["examples", "uniform"] = "uniform"
    head: Literal["average", "class-aware"] = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        FedAvg(self.weighting, self.head)

    @property
    def needs(self) -> frozenset[str]:
        return FedAvg(self.weighting, self.head).needs | self._for_metric

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        return FedAvg(self.weighting, self.head)(self.align(uploads))


@dataclass(frozen=True)
class MAEchoOT(MAEcho, Alignment):
    """Align, then run MA-Echo. It has the options of both. `seed` is the seed of everything random in either step."""

    guide: ClassVar[Guide] = Guide(
        does="brings the neurons of all clients into one order as `ot` does, then runs `ma-echo`",
        uploads="projectors (or Grams); neuron spaces (found by tracing)",
        different="yes",
        convolutions="yes",
        residual="yes",
        cost="seconds; memory of all uploads",
        when="as `ma-echo`, if clients started from different initialisations",
    )

    _name: ClassVar[str] = "ma-echo+ot"

    def __post_init__(self) -> None:
        MAEcho.__post_init__(self)
        Alignment.__post_init__(self)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | self._for_metric

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        return super().__call__(self.align(uploads))
