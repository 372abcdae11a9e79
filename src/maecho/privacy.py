"""Differential privacy: the promise, the noise that keeps it, and the total cost of several releases.

Neighbouring data sets differ by one example of one client, added or removed. One message of a client, an answer or an
upload, is one release. It consists of k sums. One example changes each sum by no more than the sum's sensitivity. If
each sum is divided by its sensitivity, all k together change by at most √k. So noise of standard deviation σ√k times
the sensitivity on each sum makes the release one Gaussian mechanism of noise multiplier σ. A release may depend on the
ones before it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from maecho.errors import InputError
from maecho.options import POSITIVE, number

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NEIGHBOURING = "one example of one client, added or removed"
COVERS = "the statistics and the number of examples; the weights themselves are not covered"

Part = Literal["gram", "cross", "labels", "outputs", "totals", "counts", "examples"]
"""The sums that a release may hold, by name."""


@dataclass(frozen=True)
class Privacy:
    """The Gaussian mechanism on all that a client sends about its data.

    Args:
        noise: σ, the noise multiplier: the noise of one release, relative to what one example can change.
        clip: the largest norm of an example's inputs; larger ones are scaled down to it. In a relay the norm is that of
            all rows that the example gives a layer (patches, tokens, features of a norm, the 1 of the bias). In an
            upload it is that of the raw input.
        clip_output: the same limit for a layer's outputs. By default it is `clip`.
        delta: δ. It should be far below one over the number of examples.
        releases: how often a client answers at most. None: as often as it is asked.
        generator: the source of the noise, for tests. By default it is the operating system's cryptographic source,
            since whoever guesses a seed can subtract the noise.
    """

    noise: float
    clip: float
    clip_output: float | None = None
    delta: float = 1e-5
    releases: int | None = None
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("noise", "clip", "clip_output"):
            if name != "clip_output" or self.clip_output is not None:
                number(name, getattr(self, name), POSITIVE, 0)
        _check_delta(self.delta)
        if self.releases is not None:
            number("releases", self.releases, "a whole number, at least 1", 1, whole=True)

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        releases: int,
        clip: float,
        clip_output: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Privacy:
        """The smallest noise at which this many releases cost no more than (ε, δ). Further releases are refused."""
        number("epsilon", epsilon, POSITIVE, 0)
        _check_delta(delta)
        number("releases", releases, "a whole number, at least 1", 1, whole=True)
        with np.errstate(divide="ignore"):
            of_one = float(_library().get_sigma_gaussian(epsilon, delta))
        noise = of_one * math.sqrt(releases) * (1 + 1e-9)  # the library's solution may be a little too small
        return cls(noise, clip, clip_output, delta, releases, generator)

    def epsilon(self, releases: int = 1) -> float:
        """ε at this δ after so many releases. R Gaussian mechanisms of σ together are exactly one of σ/√R."""
        if releases == 0:
            return 0.0
        with np.errstate(divide="ignore"):
            return float(_library().get_epsilon_gaussian(self.noise / math.sqrt(releases), self.delta))

    def sensitivity(self, part: Part) -> float:
        """The most by which one example changes this sum, in the Frobenius norm.

        The example's rows H and Z are scaled down to the norms clip and clip_output. So ‖HᵀH‖ ≤ ‖H‖² ≤ clip², and
        ‖ZᵀH‖ ≤ ‖Z‖ ‖H‖ ≤ clip_output · clip. A sum that is not listed here has no bound and is never sent.
        """
        out = self.clip if self.clip_output is None else self.clip_output
        bounds: dict[Part, float] = {
            "gram": self.clip**2,
            "cross": self.clip * out,
            "labels": self.clip,
            "outputs": out,
            "totals": self.clip,
            "counts": 1.0,
            "examples": 1.0,
        }
        return bounds[part]

    def deviation(self, part: Part, parts: int) -> float:
        """The standard deviation of the noise on one sum of a release that has so many `parts`."""
        return self.noise * math.sqrt(parts) * self.sensitivity(part)

    def noisy(self, total: Tensor, part: Part, parts: int, symmetric: bool = False) -> Tensor:
        """A sum with noise, as it may leave the client.

        The lower half of a symmetric matrix is a copy of its upper half, noise included. Copying the noise alone would
        not do: the two halves of the sum differ by round-off, and their difference would reveal it without noise.
        """
        noisy = total.cpu().double() + self.deviation(part, parts) * normal(total.shape, self.generator)
        return noisy.triu() + noisy.triu(1).mT if symmetric else noisy

    def factor(self, h: Float[Tensor, "g n p d"], z: Float[Tensor, "g n p o"]) -> Float[Tensor, " n"]:
        """The factor that scales each example's rows h and z down. It is the same for both, so that z = W h stays
        true."""
        inner, outer = (rows.square().sum((0, 2, 3)).sqrt() for rows in (h, z))
        out = self.clip if self.clip_output is None else self.clip_output
        fitting = torch.minimum(self.clip / inner, out / outer).clamp(max=1)
        return torch.where((inner + outer).isfinite(), fitting, torch.zeros_like(fitting))

    def recipe(self, releases: int = 1) -> dict[str, Any]:
        """The promise as the recipe in a file states it."""
        return {
            "epsilon": self.epsilon(releases),
            "delta": self.delta,
            "releases": releases,
            "noise": self.noise,
            "clip": self.clip,
            "neighbouring": NEIGHBOURING,
            "covers": COVERS,
        }


@dataclass(frozen=True)
class NoisySums:
    """One release about a client's inputs, class by class: counts and, if they were asked for, Σ x and Σ x xᵀ."""

    held: Int[Tensor, " k"]
    """The classes whose counts are clearly above the noise. Without labels there is one class, 0."""
    counts: Float[Tensor, " classes"]
    """The noisy number of examples of every class."""
    no_labels: str
    """Why there are no labels; empty if there are."""
    shape: tuple[int, ...] = ()
    """The shape of one input."""
    totals: Float[Tensor, "classes d"] | None = None
    """Σ x of every class."""
    squares: tuple[Float[Tensor, "d d"], ...] = ()
    """Σ x xᵀ of each class that is held, or a single one for all classes together."""

    @property
    def examples(self) -> Int[Tensor, " classes"]:
        """The counts as whole numbers; 0 for classes that are not held."""
        return torch.zeros_like(self.counts).index_copy(0, self.held, self.counts[self.held]).round().long()


def normal(shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Standard normal numbers.

    Without a generator they come from the operating system's cryptographic source, 52 bits each. Torch's own generator
    would not do, since it has only 2³² different seeds.
    """
    if generator is not None:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    count = math.prod(shape)
    if not count:
        return torch.zeros(tuple(shape), dtype=torch.float64)
    bits = torch.frombuffer(bytearray(secrets.token_bytes(8 * count)), dtype=torch.int64) & (2**52 - 1)
    drawn: Tensor = torch.special.ndtri((bits.double() + 0.5) * 2.0**-52)
    return drawn.reshape(tuple(shape))


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise InputError(
            "the cost of privacy must be computed by dp-accounting, got none: pip install 'maecho[privacy]'"
        ) from error
    return dp_accounting


def _check_delta(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InputError(f"delta must lie between 0 and 1, got {value!r}")
