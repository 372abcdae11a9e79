"""How large an upload of all batches will be, from the upload of one batch.

Ranks add up over batches at most, and no matrix has more directions than its width. So the size is bounded by the
number of batches. Gaussians come once for each class, and a batch may lack some classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maecho.checking.found import SizeFound
from maecho.linalg.gaussians import Gaussians
from maecho.linalg.scatter import EXACT_WIDTH, SKETCH
from maecho.linalg.spectra import Spectrum
from maecho.statistics import STATISTICS, Statistic
from maecho.statistics.parts import entries
from maecho.upload import size
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class _Matrix:
    """One matrix that can be cut: the size of a direction, how many there may be, how often it comes."""

    layer: str
    direction: int
    most: int
    times: float

    def bytes(self, rank: int | None = None) -> float:
        return self.times * self.direction * (self.most if rank is None else min(rank, self.most))


def estimated(whole: Upload, rule: size.Rule, batches: int | None, outputs: int | None) -> tuple[SizeFound, ...]:
    """The sizes of all parts, before and after the cut. `whole` is the upload of one batch without a cut."""
    weights = sum(tensor.nbytes for tensor in whole.weights.values())
    fixed: dict[str, float] = {}
    matrices: dict[str, list[_Matrix]] = {}
    for name, value in whole.statistics.items():
        fixed[name], matrices[name] = _parts(STATISTICS[name], value, batches, outputs)
    most = {name: sum(matrix.bytes() for matrix in found) for name, found in matrices.items()}
    kept = _kept(matrices, most, rule, weights + sum(fixed.values()))
    parts = [SizeFound(name, round(fixed[name] + most[name]), round(fixed[name] + kept[name])) for name in fixed]
    return (SizeFound("weights", weights, weights), *parts)


def _parts(statistic: Statistic, value: Any, batches: int | None, outputs: int | None) -> tuple[float, list[_Matrix]]:
    """What cannot be cut of one statistic, in bytes, and what can."""
    fixed, found = 0.0, []
    for name, part in entries(value).items():
        spectra = statistic.kind.spectra(part)
        bare = statistic.kind.size(statistic.kind.cut(part, lambda spectrum: 0, False))
        times = 1.0
        if isinstance(part, Gaussians):
            seen = len(part.classes.unique())
            labelled = bool((part.classes >= 0).all())
            times = max(1.0, (outputs or seen) / seen) if labelled and batches != 1 else 1.0
        fixed += times * bare
        found += [_Matrix(name, s.bytes_of_direction, _most(s, part, batches), times) for s in spectra]
    return fixed, found


def _most(spectrum: Spectrum, part: Any, batches: int | None) -> int:
    """The most directions that a matrix has after all batches."""
    width = spectrum.width if batches is None else min(spectrum.width, spectrum.rank * batches)
    return min(width, SKETCH) if isinstance(part, Gaussians) and spectrum.width > EXACT_WIDTH else width


def _kept(
    matrices: Mapping[str, list[_Matrix]], most: Mapping[str, float], rule: size.Rule, fixed: float
) -> dict[str, float]:
    """What the cut leaves of each statistic. A share of energy is not known before: then it is the whole."""
    if isinstance(rule, size.Rank):
        return {name: sum(matrix.bytes(rule.directions) for matrix in found) for name, found in matrices.items()}
    if isinstance(rule, size.ByLayer):
        ranks = rule.directions
        return {
            name: sum(matrix.bytes(ranks.get(matrix.layer)) for matrix in found) for name, found in matrices.items()
        }
    if not isinstance(rule, size.Size):
        return dict(most)
    room = (rule.amount * fixed if rule.times else rule.amount) - fixed
    kept = {}
    for left, name in zip(range(len(most), 0, -1), sorted(most, key=most.__getitem__), strict=True):
        kept[name] = min(most[name], max(0.0, room) / left)
        room -= kept[name]
    return kept
