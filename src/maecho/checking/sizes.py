"""How large an upload of all batches will be, from the upload of one batch.

Ranks add up over batches at most, and no matrix has more directions than its width. Gaussians come once for each class
of the model, and all their covariances together have at most one direction for each example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maecho.checking.found import SizeFound
from maecho.linalg.gaussians import Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.linalg.sums.scatter import EXACT_WIDTH, SKETCH
from maecho.statistics import STATISTICS, Statistic
from maecho.statistics.parts import entries
from maecho.upload import size
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class _Matrix:
    """One matrix that can be cut: the size of a direction, how many there may be, how often it comes."""

    layer: str
    direction: int
    most: float
    times: float
    residual: float
    """What is added if the variances along cut directions are kept."""

    def bytes(self, rank: int | None = None) -> float:
        if rank is None or rank >= self.most:
            return self.times * self.direction * self.most
        return self.times * (self.direction * rank + self.residual)


def estimated(
    whole: Upload, rule: size.Rule, examples: int, batches: int | None, outputs: int | None
) -> tuple[SizeFound, ...]:
    """The sizes of all parts, before and after the cut.

    Args:
        whole: the upload of one batch without a cut.
        rule: the cut.
        examples: the number of examples in the batch.
        batches: the number of batches, if it is known.
        outputs: the number of the model's classes, if it is known.
    """
    everyone = None if batches is None else examples * batches
    weights = sum(tensor.nbytes for tensor in whole.weights.values())
    fixed: dict[str, float] = {}
    matrices: dict[str, list[_Matrix]] = {}
    for name, value in whole.statistics.items():
        fixed[name], matrices[name] = _parts(STATISTICS[name], value, batches, everyone, outputs)
    most = {name: sum(matrix.bytes() for matrix in found) for name, found in matrices.items()}
    kept = _kept(matrices, most, rule, weights + sum(fixed.values()))
    parts = [SizeFound(name, round(fixed[name] + most[name]), round(fixed[name] + kept[name])) for name in fixed]
    return (SizeFound("weights", weights, weights), *parts)


def _parts(
    statistic: Statistic, value: Any, batches: int | None, examples: int | None, outputs: int | None
) -> tuple[float, list[_Matrix]]:
    """What cannot be cut of one statistic, in bytes, and what can."""
    fixed, found = 0.0, []
    for name, part in entries(value).items():
        spectra = statistic.kind.spectra(part)
        bare = statistic.kind.size(statistic.kind.cut(part, lambda spectrum: 0, False))
        residual = statistic.kind.residual_bytes(part) / max(1, len(spectra))
        if isinstance(part, Gaussians):
            seen = len(part.classes.unique())
            more = max(1.0, (outputs or seen) / seen) if bool((part.classes >= 0).all()) and batches != 1 else 1.0
            of_one, count = spectra[0], more * len(spectra)
            width = min(of_one.width, SKETCH) if of_one.width > EXACT_WIDTH else of_one.width
            most = width if examples is None else min(width, examples / count)
            found.append(_Matrix(name, of_one.bytes_of_direction, most, count, residual))
            fixed += more * bare
        else:
            fixed += bare
            found += [_Matrix(name, s.bytes_of_direction, _most(s, batches), 1, residual) for s in spectra]
    return fixed, found


def _most(spectrum: Spectrum, batches: int | None) -> float:
    """The most directions that a matrix of sums has after all batches."""
    return spectrum.width if batches is None else min(spectrum.width, spectrum.rank * batches)


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
