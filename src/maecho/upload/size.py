"""How far an upload's statistics are cut down: by rank, by share of energy, or to a size for the whole upload."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from maecho.errors import UploadError
from maecho.linalg.spectra import Spectrum
from maecho.statistics.gaussians import Moments
from maecho.upload.upload import SPECTRA, Upload

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Rank:
    """At most this many directions."""

    directions: int


@dataclass(frozen=True)
class Share:
    """The fewest directions that hold this share of the trace."""

    share: float


@dataclass(frozen=True)
class Size:
    """The whole upload in this many bytes, or in this many times what cannot be cut: weights, counts, class means,
    Fisher, targets."""

    amount: float
    times: bool


def parse(rank: int | float | str | None) -> Rank | Share | Size:
    """64, 0.999, "3x", "5 MB" or None."""
    if rank is None:
        return Share(1.0)
    if isinstance(rank, str):
        number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(x|B|KB|MB|GB)", rank.strip())
        if number:
            times = number[2] == "x"
            return Size(float(number[1]) * (1 if times else UNITS[number[2]]), times)
    elif isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0:
        return Rank(rank)
    elif isinstance(rank, float) and 0 < rank <= 1:
        return Share(rank)
    raise UploadError(
        f'rank must be a whole number, a share of energy in (0, 1], a size like "3x" or "5 MB", or None, got {rank!r}'
    )


def cut(upload: Upload, rule: Rank | Share | Size) -> Upload:
    """The same upload, its statistics at the precision of its weights (float32 at least) and cut down."""
    double = any(tensor.dtype == torch.float64 for tensor in upload.weights.values())
    dtype = torch.float64 if double else torch.float32
    upload = _at(upload, dtype)
    if isinstance(rule, Rank):
        return _cut(upload, lambda spectrum: rule.directions)
    if isinstance(rule, Share):
        return _cut(upload, lambda spectrum: spectrum.rank_for(rule.share))
    ranks, rest = _ranks_that_fit(upload, rule)
    return _cut(upload, lambda spectrum: ranks.get(id(spectrum), spectrum.rank), rest)


def _at(upload: Upload, dtype: torch.dtype) -> Upload:
    fields: dict[str, Any] = {
        part: {name: spectrum.to(dtype=dtype) for name, spectrum in getattr(upload, part).items()}
        for part in SPECTRA.values()
    }

    def at(m: Moments) -> Moments:
        rest = None if m.residual is None else m.residual.to(dtype)
        covariances = tuple(covariance.to(dtype=dtype) for covariance in m.covariances)
        return replace(m, means=m.means.to(dtype), covariances=covariances, residual=rest)

    fields["moments"] = None if upload.moments is None else at(upload.moments)
    fields["features"] = {name: at(m) for name, m in upload.features.items()}
    fields["targets"] = None if upload.targets is None else upload.targets.to(dtype)
    fields["fisher"] = {name: tensor.to(dtype) for name, tensor in upload.fisher.items()}
    return replace(upload, **fields)


def _cut(upload: Upload, rank: Callable[[Spectrum], int], rest: bool = True) -> Upload:
    """`rest`: class variances are kept whole, entry by entry, in place of the directions that go."""
    fields: dict[str, Any] = {
        part: {name: spectrum.cut(rank(spectrum)) for name, spectrum in getattr(upload, part).items()}
        for part in SPECTRA.values()
    }

    def cut_down(m: Moments) -> Moments:
        cut = m.cut(rank)
        return cut if rest else replace(cut, residual=m.residual, in_cosines=m.in_cosines)

    fields["moments"] = None if upload.moments is None else cut_down(upload.moments)
    fields["features"] = {name: cut_down(m) for name, m in upload.features.items()}
    return replace(upload, **fields)


def _ranks_that_fit(upload: Upload, size: Size) -> tuple[dict[int, int], bool]:
    """Ranks by the id of the spectrum, and whether there is room for what is left of class variances.

    Grams, projectors, gradients and covariances, of inputs and of features, get equal parts of the room, for their
    energies cannot be compared (that of a Gram lies mostly in the mean); what one kind does not need goes to the
    others. Within a kind the share of energy is one.
    """
    kinds = [list(getattr(upload, part).values()) for part in SPECTRA.values()]
    moments = [*([] if upload.moments is None else [upload.moments]), *upload.features.values()]
    kinds += [list(m.covariances) for m in moments]
    kinds = [[s for s in spectra if s.basis is not None and s.rank] for spectra in kinds]
    fixed = upload.bytes() - sum(map(_bytes, kinds))
    room = size.amount * fixed if size.times else size.amount
    if fixed > room:
        raise UploadError(
            f"{upload.client}: the upload must fit into {room:,.0f} bytes, got {fixed:,} for what cannot be cut"
        )
    room -= fixed
    rest = sum(m.means[0].numel() * len(m.covariances) * m.means.element_size() for m in moments if m.residual is None)
    with_rest = rest <= room
    room -= rest if with_rest else 0
    ranks: dict[int, int] = {}
    kinds.sort(key=_bytes)
    for left, spectra in zip(range(len(kinds), 0, -1), kinds, strict=True):
        share = _share_that_fits(spectra, room / left)
        chosen = [s.rank_for(share) if share else 0 for s in spectra]
        ranks |= {id(s): rank for s, rank in zip(spectra, chosen, strict=True)}
        room -= sum(s.bytes // s.rank * rank for s, rank in zip(spectra, chosen, strict=True))
    return ranks, with_rest


def _bytes(spectra: Sequence[Spectrum]) -> int:
    return sum(spectrum.bytes for spectrum in spectra)


def _share_that_fits(spectra: Sequence[Spectrum], room: float) -> float:
    """The largest share of energy, by bisection; 0 if not even one direction each fits."""

    def fits(share: float) -> bool:
        return sum(s.bytes // s.rank * s.rank_for(share) for s in spectra) <= room

    if fits(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
