"""Cuts an upload's statistics: to a rank, a rank for each layer, a share of energy, or a size for the whole upload."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maecho import devices
from maecho.errors import InputError
from maecho.formatting import bytes_of
from maecho.linalg.spectra import Spectrum
from maecho.statistics import STATISTICS, Statistic
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class Rank:
    """Keeps at most this many directions."""

    directions: int


@dataclass(frozen=True)
class Share:
    """Keeps the fewest directions that hold this share of the trace."""

    share: float


@dataclass(frozen=True)
class Size:
    """Make all tensors of an upload take at most so many bytes, or so many `times` the size of what cannot be cut:
    weights, counts (of tokens too), class means, Fisher, targets."""

    amount: float
    times: bool


@dataclass(frozen=True)
class ByLayer:
    """Keeps in these layers at most so many directions, and all in the others."""

    directions: Mapping[str, int]

    def check(self, layers: Iterable[str]) -> None:
        """Raise InputError unless it speaks of these layers alone."""
        known = list(dict.fromkeys(layers))
        for name in self.directions:
            if name not in known:
                raise InputError(f"rank must name layers of the network ({', '.join(known)}), got {name!r}")


class NotEnough(Exception):  # noqa: N818 (not an error: more directions are computed)
    """Raised if more directions of a matrix fit than were computed."""


Rule = Rank | Share | Size | ByLayer


def parse(rank: int | float | str | Mapping[str, int] | None) -> Rule:
    """Read a rule from 64, 0.999, "3x", "5 MB", {"fc1": 64} or None."""
    if rank is None:
        return Share(1.0)
    if isinstance(rank, Mapping) and rank:
        for layer, directions in rank.items():
            if isinstance(directions, bool) or not isinstance(directions, int) or directions < 0:
                raise InputError(f"rank of {layer!r} must be a whole number, at least 0, got {directions!r}")
        return ByLayer(dict(rank))
    if isinstance(rank, str):
        times = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*x\s*", rank)
        if times:
            return Size(float(times[1]), times=True)
        amount = bytes_of(rank) if rank.rstrip().endswith("B") else None  # a number alone is a rank
        if amount is not None:
            return Size(amount, times=False)
    elif isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0:
        return Rank(rank)
    elif isinstance(rank, float) and 0 < rank <= 1:
        return Share(rank)
    raise InputError(
        'rank must be a whole number, one for each layer, a share of energy in (0, 1], a size like "3x" or "5 MB", or '
        f"None, got {rank!r}"
    )


def room(rule: Rule, weights: int, statistics: int) -> float | None:
    """How many bytes of directions each of so many statistics may at first be expected to need, beside weights of so
    many bytes. None: all directions are wanted.

    It is a guess. `cut` raises NotEnough if it was too low.
    """
    if not isinstance(rule, Size):
        return None
    amount = rule.amount * weights if rule.times else rule.amount
    return max(0.0, GENEROUS * (amount - weights) / max(1, statistics))


GENEROUS = 1.5
"""More than an equal part, since statistics that need less leave room to others."""


def cut(upload: Upload, rule: Rule) -> Upload:
    """The same upload with its statistics cut, and in the precision of its weights (at least float32).

    Raises NotEnough if there is room for directions that were not computed.
    """
    dtype = devices.float32_or_finer(upload.weights.values())
    values = {name: STATISTICS[name].at(value, dtype) for name, value in upload.statistics.items()}
    rank: Callable[[Spectrum], int]
    keep_variances = set(values)
    if isinstance(rule, Rank):
        rank = lambda spectrum: rule.directions  # noqa: E731
    elif isinstance(rule, Share):
        rank = lambda spectrum: spectrum.rank_for(rule.share)  # noqa: E731
    else:
        if isinstance(rule, ByLayer):
            ranks = _ranks_by_layer(upload, values, rule)
        else:
            ranks, keep_variances = _ranks_that_fit(upload, values, rule)
        rank = lambda spectrum: ranks.get(id(spectrum), spectrum.rank)  # noqa: E731
    return replace(
        upload,
        statistics={name: STATISTICS[name].cut(value, rank, name in keep_variances) for name, value in values.items()},
    )


def _ranks_by_layer(upload: Upload, values: Mapping[str, Any], rule: ByLayer) -> dict[int, int]:
    """The ranks (id of a spectrum -> rank) of all statistics that have a matrix for each layer."""
    rule.check(layer.name for layer in upload.layers)
    return {
        id(spectrum): directions
        for name, value in values.items()
        if isinstance(value, Mapping)
        for layer, directions in rule.directions.items()
        if layer in value
        for spectrum in STATISTICS[name].spectra({layer: value[layer]})
    }


def _ranks_that_fit(upload: Upload, values: Mapping[str, Any], size: Size) -> tuple[dict[int, int], set[str]]:
    """The ranks (id of a spectrum -> rank), and the statistics with room for the variances along cut directions.

    Every statistic that can be cut gets an equal part of the room. A common share of energy would be wrong, since the
    energy of a Gram lies mostly in the mean. Room that one statistic does not need goes to the others. Within a
    statistic all matrices keep the same share of energy.
    """
    groups = [[s for s in STATISTICS[name].spectra(value) if s.rank] for name, value in values.items()]
    fixed = sum(tensor.nbytes for tensor in upload.weights.values())
    bare = {name: _bare_bytes(STATISTICS[name], value) for name, value in values.items()}
    fixed += sum(bare.values())
    room = size.amount * fixed if size.times else size.amount
    if fixed > room:
        raise InputError(
            f"{upload.client}: the upload must fit into {room:,.0f} bytes, got {fixed:,} for what cannot be cut"
        )
    room -= fixed
    keep_variances = set()
    residuals = {
        name: STATISTICS[name].residual_bytes(value) + STATISTICS[name].bytes(value) - bare[name] - _bytes(spectra)
        for (name, value), spectra in zip(values.items(), groups, strict=True)
    }
    for name in sorted(residuals, key=residuals.__getitem__):
        if residuals[name] <= room:
            keep_variances.add(name)
            room -= residuals[name]
    ranks: dict[int, int] = {}
    groups.sort(key=_bytes)
    for left, spectra in zip(range(len(groups), 0, -1), groups, strict=True):
        share = _share_that_fits(spectra, room / left)
        chosen = [s.rank_for(share) if share else 0 for s in spectra]
        if any(rank > s.rank for s, rank in zip(spectra, chosen, strict=True)):
            raise NotEnough
        ranks |= {id(s): rank for s, rank in zip(spectra, chosen, strict=True)}
        room -= sum(s.bytes_of_direction * rank for s, rank in zip(spectra, chosen, strict=True))
    return ranks, keep_variances


def _bytes(spectra: Sequence[Spectrum]) -> int:
    """The size of all directions."""
    return sum(spectrum.bytes_of_direction * spectrum.rank for spectrum in spectra)


def _bare_bytes(statistic: Statistic, value: Any) -> int:
    """The size of what no cut can remove. Variances along cut directions do not count: they may go as well."""
    return statistic.bytes(statistic.cut(value, lambda spectrum: 0, keep_variances=False))


def _share_that_fits(spectra: Sequence[Spectrum], room: float) -> float:
    """The largest share of energy that fits, by bisection. 0 if not even one direction of each matrix fits."""

    def fits(share: float) -> bool:
        return sum(s.bytes_of_direction * s.rank_for(share) for s in spectra) <= room

    if fits(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
