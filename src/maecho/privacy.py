"""Differential privacy: what is promised, the noise behind it, and what several releases add up to.

Neighbouring data sets differ by one example of one client, added or removed. What a client says at once, an answer or
an upload, is one release: k sums, each of which one example moves by no more than its sensitivity. Measured in
sensitivities, the k together move by √k at most, so noise of standard deviation σ√k times its sensitivity on each sum
makes the release one Gaussian mechanism of noise multiplier σ. Releases may depend on those before.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maecho.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NEIGHBOURING = "one example of one client, added or removed"
COVERS = "the statistics and the number of examples; the weights themselves are not covered"


@dataclass(frozen=True)
class Privacy:
    """The Gaussian mechanism on all that a client says about its data.

    Args:
        noise: σ, the noise multiplier: the noise of one release, measured in what one example can change.
        clip: the norm to which an example's inputs are brought down, all rows together that it gives a layer (patches,
            tokens, features of a norm, the 1 of the bias). Of an upload: the norm of the raw input.
        clip_output: the same for what a layer gives out; without it, `clip`.
        delta: δ, well below one over the number of examples.
        releases: a client answers no more often than this; None: as often as it is asked.
        generator: where the noise comes from, for tests. Without it: the operating system's cryptographic source,
            since a seed that can be guessed takes the noise away again.
    """

    noise: float
    clip: float
    clip_output: float | None = None
    delta: float = 1e-5
    releases: int | None = None
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("noise", "clip", "clip_output"):
            _check_positive(name, getattr(self, name), optional=name == "clip_output")
        _check_delta(self.delta)
        if self.releases is not None:
            _check_releases(self.releases)

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
        """The least noise at which this many releases cost no more than (ε, δ); further ones are refused."""
        _check_positive("epsilon", epsilon)
        _check_delta(delta)
        _check_releases(releases)
        with np.errstate(divide="ignore"):
            of_one = float(_library().get_sigma_gaussian(epsilon, delta))
        noise = of_one * math.sqrt(releases) * (1 + 1e-9)  # the library's root may lie on either side
        return cls(noise, clip, clip_output, delta, releases, generator)

    def epsilon(self, releases: int = 1) -> float:
        """ε at this δ after so many releases: R Gaussian mechanisms of σ are one of σ/√R, exactly."""
        if releases == 0:
            return 0.0
        with np.errstate(divide="ignore"):
            return float(_library().get_epsilon_gaussian(self.noise / math.sqrt(releases), self.delta))

    def sensitivity(self, part: str) -> float:
        """The most that one example changes a sum, in the Frobenius norm.

        With its rows H and Z brought down to clip and clip_output: ‖HᵀH‖ ≤ ‖H‖² and ‖ZᵀH‖ ≤ ‖Z‖ ‖H‖. A sum that is not
        named here has no bound and does not leave.
        """
        out = self.clip if self.clip_output is None else self.clip_output
        bounds = {
            "gram": self.clip**2,
            "cross": self.clip * out,
            "labels": self.clip,
            "outputs": out,
            "totals": self.clip,
            "counts": 1.0,
            "examples": 1.0,
        }
        return bounds[part]

    def deviation(self, part: str, parts: int) -> float:
        """The standard deviation of the noise on a sum that is released together with others, `parts` in all."""
        return self.noise * math.sqrt(parts) * self.sensitivity(part)

    def noisy(self, total: Tensor, part: str, parts: int, symmetric: bool = False) -> Tensor:
        """A sum as it may leave the client. Of a symmetric matrix the upper half is sent and mirrored: were the noise
        alone mirrored, round-off in the lower half of the sum would show."""
        sent = total.cpu().double() + self.deviation(part, parts) * normal(total.shape, self.generator)
        return sent.triu() + sent.triu(1).mT if symmetric else sent

    def factor(self, h: Float[Tensor, "g n p d"], z: Float[Tensor, "g n p o"]) -> Float[Tensor, " n"]:
        """By what each example's rows of both are multiplied: one factor, so that z = W h stays true."""
        inner, outer = (rows.square().sum((0, 2, 3)).sqrt() for rows in (h, z))
        out = self.clip if self.clip_output is None else self.clip_output
        fitting = torch.minimum(self.clip / inner, out / outer).clamp(max=1)
        return torch.where((inner + outer).isfinite(), fitting, torch.zeros_like(fitting))

    def recipe(self, releases: int = 1) -> dict[str, Any]:
        """What a file says of how private it is."""
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
    """What one release says of inputs, class by class: counts, and where they were asked for Σ x and Σ x xᵀ."""

    held: Int[Tensor, " k"]
    """The classes that stand out of the noise; one, of number 0, where there are no labels."""
    counts: Float[Tensor, " classes"]
    """Noisy numbers of examples."""
    labelled: bool
    shape: tuple[int, ...] = ()
    """Of one input."""
    totals: Float[Tensor, "classes d"] | None = None
    squares: tuple[Float[Tensor, "d d"], ...] = ()
    """Σ x xᵀ of each class that is held, or a single one of all."""

    @property
    def examples(self) -> Int[Tensor, " classes"]:
        """The counts of classes that are held, as whole numbers; 0 of the others."""
        return torch.zeros_like(self.counts).index_copy(0, self.held, self.counts[self.held]).round().long()


def normal(shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Standard normal numbers. Without a generator from the operating system's cryptographic source, 52 bits each:
    torch's own knows no more than 2³² seeds."""
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
            "what privacy costs is counted by dp-accounting, got none: pip install 'maecho[privacy]'"
        ) from error
    return dp_accounting


def _check_positive(name: str, value: object, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def _check_delta(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {value!r}")


def _check_releases(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"releases must be a whole number, at least 1, got {value!r}")
