"""Keeps a relay client's promise of privacy: all that it sends is bounded, noisy and counted.

The number of examples decides how much the client's weights count. It is a noisy sum like the others. It is released
with the first answer and stays the same from then on. If it were public, neighbouring data sets would need to have the
same size, with one example replaced by another. A replaced example changes the sums twice as much, so every sum would
need twice the noise, only to keep one number exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.echo.totals import ByClass, UnitSums
from maecho.errors import InputError, text_of
from maecho.network.attention import slow_path
from maecho.network.batches.inputs import examples, subset
from maecho.network.forward import call
from maecho.network.hooks import watching
from maecho.network.units import network
from maecho.privacy import Privacy

ALIKE = 1e-3
"""Two rows that differ by no more than this, relative to their size, count as equal up to round-off."""


class PrivacyLedger:
    """Adds the noise of one client's releases and counts them.

    Args:
        privacy: the promise.
        client: its name, for errors.
        released: how many releases of the same data there were before. An upload is one release.
    """

    def __init__(self, privacy: Privacy, client: str, released: int = 0):
        self.privacy, self.client, self.released = privacy, client, released
        self._examples: float | None = None
        self._checked = False

    def check_allowed(self) -> None:
        """Raise InputError if no further release is allowed."""
        most = self.privacy.releases
        if most is not None and self.released >= most:
            raise InputError(
                f"{self.client}: with this privacy the data may be asked {most} time(s), got one question more"
            )

    def release(
        self, count: int, sums: Mapping[str, UnitSums], diagonal: Collection[str] = ()
    ) -> tuple[float, dict[str, UnitSums]]:
        """The number of examples and the sums of every unit, with noise.

        `diagonal` names the units whose gram is a diagonal; every other gram is a symmetric matrix. The sums of a unit
        also say the variance of the noise on an entry of the gram. It is not secret. It tells the server how accurate
        the sums are.
        """
        k = sum(_sent(found) for found in sums.values()) + (self._examples is None)
        if k:
            self.released += 1
        if self._examples is None:
            noisy = self.privacy.noisy(torch.tensor(float(count)), "examples", k)
            self._examples = max(1.0, float(noisy))
        out = {unit: self._noisy(found, k, symmetric=unit not in diagonal) for unit, found in sums.items()}
        return self._examples, out

    def _noisy(self, sums: UnitSums, k: int, symmetric: bool) -> UnitSums:
        """One unit's sums with noise, in a release of k sums."""
        noisy, by_class = self.privacy.noisy, sums.by_class
        gram, cross = noisy(sums.gram, "gram", k, symmetric), noisy(sums.cross, "cross", k)
        if by_class is not None:
            # No outputs, since only layers before the head need them. With privacy these get no sums by class.
            by_class = ByClass(noisy(by_class.labels, "labels", k), noisy(by_class.counts, "counts", k))
        variance = torch.tensor(self.privacy.deviation("gram", k) ** 2, dtype=torch.float64)
        return UnitSums(gram, cross, by_class, variance)

    def check_network(self, model: nn.Module, inputs: Iterable[Any]) -> None:
        """Raise InputError unless every layer has the examples on its first axis, and no example's rows depend on
        another example. Otherwise one example could change the rows of others, without any bound.

        Two examples are used for this test.
        """
        if self._checked:
            return
        few = _few(inputs)
        if few is None:
            return
        together = _seen(model, few)
        for i in range(examples(few)):
            try:
                alone = _seen(model, subset(few, slice(i, i + 1), examples(few)))
            except (RuntimeError, ValueError) as error:
                raise InputError(
                    f"{self.client}: with privacy the model must run on a single example, got an error: "
                    f"{text_of(error)}"
                ) from error
            for name, calls in together.items():
                if len(calls) > 1:
                    raise InputError(
                        f"{self.client}: with privacy a layer must run once, got {name!r}, which runs {len(calls)} "
                        "times"
                    )
                if not (len(alone.get(name, ())) == 1 and _same(calls[0][i : i + 1], alone[name][0])):
                    raise InputError(
                        f"{self.client}: with privacy every example must give a layer rows of its own on the first "
                        f"axis, whatever the other examples are, got other rows at {name!r}"
                    )
        self._checked = True


def _sent(sums: UnitSums) -> int:
    """How many sums of one unit a release holds: gram and cross, and by class labels and counts."""
    return 2 if sums.by_class is None else 4


def _few(inputs: Iterable[Any]) -> Any:
    """Two examples of one batch, or one if no batch has two. None if there is no example."""
    single = None
    for x in inputs:
        if examples(x) > 1:
            return subset(x, slice(2), examples(x))
        if examples(x):
            single = x
    return single


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal up to round-off."""
    if x.shape != y.shape:
        return False
    x, y = x.double(), y.double()
    return torch.allclose(x, y, rtol=ALIKE, atol=ALIKE * float(x.abs().max()) if x.numel() else 0.0, equal_nan=True)


def _seen(model: nn.Module, inputs: Any) -> dict[str, list[Tensor]]:
    """The inputs of each layer, call by call. Modules that share a weight count as one layer."""
    found: dict[str, list[Tensor]] = {}
    layers = {name: unit.name for unit in network(model).values() for name in unit.modules}

    def keep(name: str, module: nn.Module, x: Tensor) -> None:
        found.setdefault(layers[name], []).append(x.detach().clone())

    device = devices.of(model)
    with watching(model, layers, keep), torch.no_grad(), slow_path(), devices.full_precision():
        call(model, inputs, device)
    return found
