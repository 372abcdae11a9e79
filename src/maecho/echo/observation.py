"""Sums over one client's data for a stage of the merged network.

h is the merged network's input to a unit. z is the output of the client's own unit for the same sample. The sums are
Σ h hᵀ and Σ z hᵀ. Both networks run on every batch, but no further than the end of the stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from maecho import devices
from maecho.echo.replay.replay import Replay
from maecho.echo.totals import ByClass, UnitSums
from maecho.echo.withheld.carriers import Carriers, Kept
from maecho.errors import InputError
from maecho.linalg.sums.weighted import square
from maecho.network import kinds
from maecho.network.attention import slow_path
from maecho.network.batches.labels import NO_LABELS, complaint
from maecho.network.batches.reading import Reader
from maecho.network.forward import Pass, call, forward
from maecho.network.hooks import Enough, ending_early, watching
from maecho.network.units import Unit

Limit = Callable[[Tensor, Tensor], Tensor]
"""Limits what one example can add to the sums. It takes the rows [g, examples, places, in] and [g, examples, places,
out], and gives the factors [examples] that scale each example's rows."""

See = Callable[[Tensor, Tensor | None, int], None]
"""Is shown the rows that are added up, the labels beside them, and the number of their examples."""


@dataclass(frozen=True)
class Observed:
    """The result of one pass over a client's data."""

    examples: int
    units: Mapping[str, UnitSums]
    """The sums of every unit of the stage."""
    withheld: Mapping[str, int] = field(default_factory=dict)
    """How many inputs of a unit are left out, since too few examples carry them."""


@dataclass(frozen=True)
class _Seen:
    """What one batch showed of every unit, call by call."""

    outputs: Mapping[str, list[Tensor]]
    """The outputs of the client's own unit."""
    inputs: Mapping[str, list[tuple[str, Tensor]]]
    """The inputs of the merged network's unit, each with the name of the module that it enters."""


def observe(
    own: nn.Module,
    merged: nn.Module,
    units: Sequence[Unit],
    batches: Iterable[Any],
    client: str,
    *,
    layers_with_labels: Collection[str] = (),
    classes: int = 0,
    calls: Mapping[str, int] | None = None,
    reader: Reader | None = None,
    limit: Limit | None = None,
    minimum: int | None = None,
    progress: bool | None = None,
    replay: Replay | None = None,
) -> Observed:
    """Pass over a client's data once and sum up.

    Args:
        own: the client's own network.
        merged: the merged network so far.
        units: the units of the stage.
        batches: the client's data.
        client: the client's name, for errors.
        layers_with_labels: names of units that also get sums by class, if all examples have labels and each example
            gives the unit one row.
        classes: labels must be below this number.
        calls: how often each module runs. With it a pass ends as soon as all units have run.
        reader: finds inputs and labels in a batch.
        limit: limits what one example can add, for privacy.
        minimum: so many examples must carry every input and every class. Others are left out, as if they were 0.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        replay: keeps what earlier passes have computed. None: everything is computed.
    """
    found: dict[str, UnitSums] = {}
    pair = _OwnAndMerged(own, merged, units, calls or {}, replay)
    total, labelled = 0, True
    carriers = None if minimum is None else Carriers(minimum)
    reader = reader or Reader(own, client)
    for step in forward(pair, batches, client, progress, reader=reader, raw=True):
        total += step.size
        labels_of_step = _labels(step, classes, reader) if layers_with_labels else step.labels
        labelled = labelled and labels_of_step is not None
        for unit in units:
            calls_own, calls_merged = step.output.outputs[unit.name], step.output.inputs[unit.name]
            if len(calls_own) != len(calls_merged):
                raise InputError(
                    f"{client}: {unit.name!r} must run as often in the merged network as in the client's, "
                    f"got {len(calls_merged)} and {len(calls_own)} times"
                )
            if limit is not None and len(calls_merged) > 1:
                raise InputError(
                    f"{client}: with privacy a layer must run once, got {unit.name!r}, which runs "
                    f"{len(calls_merged)} times"
                )
            for turn, (z, (module, x)) in enumerate(zip(calls_own, calls_merged, strict=True)):
                row_each = unit.layer.one_row_each(x, step.size) and not unit.diagonal
                labels = labels_of_step if unit.name in layers_with_labels and row_each else None
                y = None if labels is None else one_hot(labels.to(x.device), classes).double()
                if limit is not None and len(x) != step.size:
                    raise InputError(
                        f"{client}: with privacy every example must give a layer rows of its own, got {len(x)} at "
                        f"{unit.name!r} for {step.size} example(s)"
                    )
                see = None
                if carriers is not None:
                    apart = len(x) == step.size
                    see = partial(_see, carriers, unit, merged.get_submodule(module), apart, turn)
                for sums in _pieces(unit, merged.get_submodule(module), x, z, y, limit, see):
                    found[unit.name] = found[unit.name].add_(sums) if unit.name in found else sums
    if not total:
        raise InputError(f"{client}: the batches must hold at least one example, got none")
    for unit in units:
        if unit.name not in found:
            raise InputError(f"{client}: sums must be of layers that run, got {unit.name!r}, which never does")
    if not labelled:  # sums by class must cover the same examples as the other sums
        found = {name: replace(sums, by_class=None) for name, sums in found.items()}
    if carriers is None:
        return Observed(total, found)
    if total < carriers.minimum:
        raise InputError(f"{client}: an answer must be of at least {carriers.minimum} examples, got {total}")
    kept = {name: carriers.kept(name) for name in found}
    withheld = {name: int((~one.inputs).sum()) for name, one in kept.items() if not one.inputs.all()}
    found = {name: _without(one, kept[name], carriers.minimum) for name, one in found.items()}
    return Observed(total, found, withheld)


def _see(
    carriers: Carriers, unit: Unit, module: nn.Module, apart: bool, turn: int, h: Tensor, y: Tensor | None, n: int
) -> None:
    """Show rows of n examples to the carriers. If examples cannot be told apart, they count as one."""
    width = kinds.inputs(module) if unit.layer.one_hot else h.shape[-1]
    carriers.see(unit.name, h, n if apart else 1, width, y, turn)


def _without(sums: UnitSums, kept: Kept, minimum: int) -> UnitSums:
    """The sums as they would be if what is not kept had been 0."""
    inputs, by_class = kept.inputs.double(), sums.by_class
    one_hot_rows = sums.gram.shape[-2] == 1 != sums.gram.shape[-1]
    gram = sums.gram * (inputs.unsqueeze(1) if one_hot_rows else inputs.unsqueeze(2) * inputs.unsqueeze(1))
    if by_class is not None and kept.by_class is not None:
        held = (by_class.counts >= minimum).double()
        labels = by_class.labels * kept.by_class * inputs * held[:, None]
        outputs = None if by_class.outputs is None else by_class.outputs * held[:, None]
        by_class = ByClass(labels, by_class.counts * held, outputs, by_class.squares)
    return replace(sums, gram=gram, cross=sums.cross * inputs.unsqueeze(1), by_class=by_class)


def _labels(step: Pass, classes: int, reader: Reader) -> Tensor | None:
    """The labels of a batch, if all are classes of the model. If they cannot be used, the client is warned."""
    reason = step.no_labels if step.labels is None else complaint(step.labels, classes)
    if reason not in ("", NO_LABELS):
        reader.lost_labels(reason)
    return None if reason else step.labels


def _pieces(
    unit: Unit,
    module: nn.Module,
    x: Tensor,
    z: Tensor,
    y: Tensor | None,
    limit: Limit | None,
    see: See | None = None,
) -> Iterator[UnitSums]:
    """The sums of one call of a unit, piece by piece, to save memory."""
    if kinds.unbatched(module, x):
        x, z = x.unsqueeze(0), z.unsqueeze(0)
    if not (unit.bias or unit.diagonal):
        # Modules that share a weight may each have a bias. Biases are then averaged, and the weight is fitted to z
        # without them.
        z = kinds.without_bias(module, z)
    at_once = kinds.examples_at_once(module, x)
    for at in range(0, len(x), at_once):
        piece = slice(at, at + at_once)
        yield _sums(unit, module, x[piece], z[piece], None if y is None else y[piece], limit, see)


def _sums(
    unit: Unit, module: nn.Module, x: Tensor, z: Tensor, y: Tensor | None, limit: Limit | None, see: See | None
) -> UnitSums:
    h, t = unit.rows(module, x), unit.output_rows(module, z).double()
    if unit.layer.one_hot:
        h = h[0]
        if see is not None:
            see(h, y, len(x))
        d, o = kinds.inputs(module), t.shape[-1]
        counts = h.bincount(minlength=d).double()
        if limit is not None:
            factor = _factor(limit, h.new_ones(1, len(h), 1).double(), t, len(x))
            counts = h.bincount(factor.square(), minlength=d)
            t = _scaled(t, factor.square())
        total = torch.zeros(d, o, dtype=torch.float64, device=t.device).index_add_(0, h, t[0])
        return UnitSums(counts.reshape(1, 1, d), total.T.unsqueeze(0).contiguous())
    h = h.double()
    if unit.bias:
        h = torch.cat([h, h.new_ones(*h.shape[:-1], 1)], -1)
    if see is not None:
        see(h, y, len(x))
    if limit is not None:
        factor = _factor(limit, h, t, len(x))
        h, t = _scaled(h, factor), _scaled(t, factor)
    by_class = None
    if y is not None:
        centred = t[0] - t[0].mean(-1, keepdim=True)
        squares = torch.stack([t[0].square().sum(), centred.square().sum()])
        by_class = ByClass(y.T @ h[0], y.sum(0), y.T @ t[0], squares)
    return UnitSums(square(h.mT), t.mT @ h, by_class)


def _factor(limit: Limit, h: Tensor, t: Tensor, examples: int) -> Tensor:
    """The limit's factors, one for each row. All rows of an example get the same one."""
    if h.shape[1] % examples:
        raise InputError(
            "with privacy every example must give a layer the same number of rows, got "
            f"{h.shape[1]} rows of {examples} examples"
        )
    places = h.shape[1] // examples
    return limit(h.unflatten(1, (examples, places)), t.unflatten(1, (examples, places))).repeat_interleave(places)


def _scaled(rows: Tensor, factor: Tensor) -> Tensor:
    """Rows [..., n, d], each times its own factor. Here 0 times infinity is 0."""
    factor = factor.unsqueeze(-1)
    return torch.where(factor > 0, rows * factor, torch.zeros_like(rows))


class _OwnAndMerged(nn.Module):
    """Runs a client's network and the merged one on the same inputs, up to the end of a stage."""

    def __init__(
        self, own: nn.Module, merged: nn.Module, units: Sequence[Unit], calls: Mapping[str, int], replay: Replay | None
    ):
        super().__init__()
        self.replay = replay
        self.own, self.merged = own, merged
        self.units, self.calls = units, calls

    def forward(self, *args: Any, **kwargs: Any) -> _Seen:
        device = devices.of(self.own)
        given = kwargs or args
        outputs: dict[str, list[Tensor]] = {unit.name: [] for unit in self.units}
        inputs: dict[str, list[tuple[str, Tensor]]] = {unit.name: [] for unit in self.units}
        ends = {name: unit.name for unit in self.units for name in unit.ends}
        starts = {name: unit.name for unit in self.units for name in unit.modules}

        def leave(name: str, module: nn.Module, x: Tensor, z: Tensor) -> None:
            outputs[ends[name]].append(z.detach().clone())  # the next module may write into z
            self._stop_when_done(outputs)

        def enter(name: str, module: nn.Module, x: Tensor) -> None:
            inputs[starts[name]].append((name, x.detach().clone()))
            self._stop_when_done(inputs)

        if not self.units:
            return _Seen(outputs, inputs)
        skipping: list[contextlib.AbstractContextManager[None]] = [contextlib.nullcontext()] * 2
        if self.replay is not None:
            self.replay.enter(self.own, given)
            skipping = [self.replay.own(self.own), self.replay.merged(self.merged)]
        with slow_path(), ending_early(), watching(self.own, ends, after=leave), skipping[0]:
            call(self.own, given, device)
        with slow_path(), ending_early(), watching(self.merged, starts, before=enter), skipping[1]:
            call(self.merged, given, device)
        return _Seen(outputs, inputs)

    def _stop_when_done(self, found: Mapping[str, list[Any]]) -> None:
        """End the pass once every unit has run. If a module runs more than once, the pass goes to its end, since the
        module may run more often on other inputs."""
        if all(len(found[u.name]) == 1 and all(self.calls.get(n) == 1 for n in u.modules) for u in self.units):
            raise Enough
