"""The statistic "moments": one or several Gaussians for every class of raw inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maecho.errors import InputError, UploadError
from maecho.linalg.finite import is_finite
from maecho.linalg.gaussians import NO_CLASS, Covariance, Gaussians, nearer_to_diagonal
from maecho.linalg.spectra import Spectrum
from maecho.linalg.sums.scatter import Scatter
from maecho.linalg.symmetric import eigenvalues
from maecho.network.forward import Pass
from maecho.privacy import NoisySums
from maecho.statistics.parts import GAUSSIANS, check_real, is_whole
from maecho.statistics.statistic import Carrier, Found, Gatherer, NotGathered, Options, Setting, Statistic

if TYPE_CHECKING:
    from jaxtyping import Float

FEW = 10
"""The mean of a class with no more examples than this reveals much about each of them."""
MOST_CLASSES = 2**24
"""The most classes, for uploads that do not say how many there are. Counting labels takes memory up to the largest."""
NO_MEAN = "the inputs are not one tensor of real numbers, so they have no mean"
AT_ONCE = 512
"""How many examples a class are waited for before they are added up."""
MOST_WAITING = 2**24
"""The most numbers that wait."""
CLUSTERED = 2000
"""How many examples of a class k-means looks at. Later examples go to the nearest centre."""


class Moments(Statistic):
    """Count, mean and covariance of the raw inputs, class by class."""

    name = "moments"
    reveals = (
        "The average raw input of every class and how inputs vary around it. For aligned images the averages are "
        "recognisable pictures. An average of one example is that example."
    )
    kind = GAUSSIANS
    by_default = additive = of_inputs = private = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _OfInputs(setting.options)

    def recipe(self, options: Options) -> str:
        return (
            "count, mean and covariance of the raw inputs, class by class, "
            f"Gaussians a class: {options.gaussians}, covariance: {options.covariance}"
        )

    def of_noisy(self, sums: NoisySums) -> Gaussians:
        assert sums.totals is not None
        n = sums.counts[sums.held]
        means = sums.totals[sums.held] / n[:, None]
        weights = list(n.diag()) if len(sums.squares) == len(n) else [n]
        covariances = []
        for square, weight in zip(sums.squares, weights, strict=True):
            between = (means.mT * weight) @ means
            covariances.append(_semidefinite((square - between) / weight.sum()))
        return Gaussians(
            classes=torch.tensor([NO_CLASS]) if sums.no_labels else sums.held,
            counts=sums.examples[sums.held],
            means=means,
            covariances=tuple(covariances),
            shape=sums.shape,
        )

    def check(self, value: Any, carrier: Carrier) -> Any:
        check_gaussians(value, carrier)
        return value

    def warnings(self, value: Any, carrier: Carrier) -> list[str]:
        found = []
        for label, count in zip(value.classes.tolist(), value.counts.tolist(), strict=True):
            which = "the data" if label == NO_CLASS else f"class {label}"
            if count == 1:
                found.append(f"{which} has 1 example: its mean IS that example")
            elif count <= FEW:
                found.append(f"{which} has only {count} examples: its mean and covariance nearly are those examples")
        return found


def check_gaussians(value: Any, carrier: Carrier, of: str = "") -> None:
    """Raise UploadError unless the Gaussians are sound. `of` says in the message what they describe, if not the raw
    inputs."""
    client = carrier.client
    if not isinstance(value, Gaussians):
        raise UploadError(f"{client}: class moments{of} must be Gaussians, got {type(value).__name__}")
    check_real(f"{client}: class means and variances{of}", value.means, value.residual)
    if not is_finite(value.means):
        raise UploadError(f"{client}: class means{of} must be finite, got NaN or infinity")
    if not is_whole(value.counts) or not is_whole(value.classes):
        got = ", ".join(str(tensor.dtype) for tensor in (value.classes, value.counts))
        raise UploadError(f"{client}: classes and counts of the class moments{of} must be whole numbers, got {got}")
    counted = sum(value.counts.tolist())  # in Python, since torch's sums wrap at 2**63
    if counted != carrier.examples or bool((value.counts < 1).any()):
        raise UploadError(
            f"{client}: counts of the class moments{of} must be positive and sum to its {carrier.examples} examples, "
            f"got {counted}"
        )
    counts = carrier.statistics.get("classes")
    labels = MOST_CLASSES if counts is None else len(counts)
    lowest, highest = (int(end) for end in value.classes.aminmax())
    if lowest < NO_CLASS or highest >= labels:
        raise UploadError(
            f"{client}: classes of the class moments{of} must lie in 0 … {labels - 1}, or be {NO_CLASS} for no class, "
            f"got {lowest} … {highest}"
        )
    for covariance in value.covariances:
        check_real(f"{client}: class covariances{of}", covariance.values, covariance.basis)
        wrong = covariance.complaint()
        if wrong:
            raise UploadError(f"{client}: class covariances{of} must be {wrong}")
    low = 0.0 if value.residual is None or not value.residual.numel() else float(value.residual.min())
    if value.residual is not None and not (is_finite(value.residual) and low >= 0):
        raise UploadError(f"{client}: the residual class variances{of} must be finite and not negative, got {low:.3g}")


def _semidefinite(A: Tensor) -> Spectrum:
    """The nearest positive semidefinite matrix. Small positive eigenvalues stay, although they may come from noise
    alone: to drop them loses more than it gains."""
    s, U = eigenvalues(A)
    return Spectrum(s.flip(-1).unsqueeze(0), U.flip(-1).unsqueeze(0)).cut(int((s > 0).sum()))


class _OfInputs(Gatherer):
    """Sums up the moments of the network's inputs."""

    def __init__(self, options: Options):
        self._scatter = ClassScatter(options.gaussians, options.covariance)
        self._reason = ""

    def add(self, step: Pass) -> None:
        if not (isinstance(step.inputs, Tensor) and step.inputs.is_floating_point()):
            self._reason = NO_MEAN
        elif self._scatter.shape not in (None, tuple(step.inputs.shape[1:])):
            self._reason = "the inputs are not all of one shape, so they have no mean"
        else:
            self._scatter.add(step.inputs.detach(), step.labels)

    def value(self, found: Found) -> Gaussians:
        if self._reason:
            raise NotGathered(self._reason)
        return self._scatter.moments(found.enough)


class ClassScatter:
    """Gathers the moments of examples that come in batches.

    Args:
        gaussians: how many for each class. With several, k-means on the first examples of a class decides to which
            Gaussian an example belongs.
        covariance: "class" for one covariance for each Gaussian, or "shared" for a single one.
    """

    def __init__(self, gaussians: int = 1, covariance: Covariance = "class") -> None:
        self.shape: tuple[int, ...] | None = None
        self._gaussians, self._covariance = gaussians, covariance
        self._classes: dict[int, _Parts] = {}
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor, labels: Tensor | None) -> None:
        """Add a batch. Without labels, all examples are of one class, NO_CLASS."""
        self.shape = tuple(x.shape[1:])
        x = x.reshape(len(x), -1)
        x = x.cpu() if x.device.type == "mps" else x.clone()  # mps has no float64; others may write into x
        if labels is None:
            labels = torch.full((len(x),), NO_CLASS)
        self._waiting.append((x, labels.to(x.device)))
        entries = sum(rows.numel() for rows, _ in self._waiting)
        if entries >= MOST_WAITING or entries >= AT_ONCE * max(1, len(self._classes)) * x.shape[1]:
            self._divide()

    def _divide(self) -> None:
        """Give every class its examples among those that wait. A product of many rows costs less than many of few."""
        if not self._waiting:
            return
        assert self.shape is not None
        x, labels = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        for label in labels.unique().tolist():
            if label not in self._classes:
                self._classes[label] = _Parts(self._gaussians, self.shape, x.device)
            self._classes[label].add(x[labels == label])

    def moments(self, enough: Callable[[Sequence[int]], int | None] | None = None) -> Gaussians:
        """The moments of everything that was added. `enough` says how many directions are wanted of covariances of
        these widths; by default all."""
        assert self.shape is not None
        self._divide()
        found: list[tuple[int, Scatter]] = []
        for label in sorted(self._classes):
            self._classes[label].settle()
            found += [(label, scatter) for scatter in self._classes[label].scatters if scatter.count]
        scatters = [scatter for _, scatter in found]
        spread = self._spread(scatters)
        wanted = None if enough is None else enough([len(scatter.mean) for scatter in spread])
        covariances = [scatter.covariance(wanted) for scatter in spread]
        residual, in_cosines = _lost(spread, covariances)
        return Gaussians(
            classes=torch.tensor([label for label, _ in found]),
            counts=torch.tensor([scatter.count for scatter in scatters]),
            means=torch.stack([scatter.mean for scatter in scatters]).cpu(),
            covariances=tuple(covariance.to(device=torch.device("cpu")) for covariance in covariances),
            shape=self.shape,
            residual=residual,
            in_cosines=in_cosines,
        )

    def _spread(self, scatters: list[Scatter]) -> list[Scatter]:
        """The scatter matrices that the covariances are computed from."""
        if self._covariance == "class":
            return scatters
        pooled = Scatter(scatters[0].shape, scatters[0].mean.device)
        for scatter in scatters:
            pooled.add_scatter(scatter)
        return [pooled]


class _Parts:
    """Assigns the examples of one class to its Gaussians."""

    def __init__(self, parts: int, shape: tuple[int, ...], device: torch.device):
        self.scatters = [Scatter(shape, device) for _ in range(parts)]
        self._waiting: list[Tensor] = []
        self._centres: Tensor | None = None

    def add(self, x: Float[Tensor, "n d"]) -> None:
        if len(self.scatters) == 1:
            self.scatters[0].add(x)
        elif self._centres is None:
            self._waiting.append(x)
            if sum(map(len, self._waiting)) >= CLUSTERED:
                self.settle()
        else:
            nearest = torch.cdist(x.double(), self._centres).argmin(1)
            for k in nearest.unique().tolist():
                self.scatters[k].add(x[nearest == k])

    def settle(self) -> None:
        """Compute the centres, and assign the examples that wait for them."""
        if self._waiting:
            x, self._waiting = torch.cat(self._waiting), []
            self._centres = centres(x.double(), len(self.scatters))
            self.add(x)


def centres(x: Float[Tensor, "n d"], k: int) -> Float[Tensor, "m d"]:
    """Centres of k clusters by k-means; the same x gives the same ones. Fewer than k if x has fewer different rows."""
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise InputError(
            "several Gaussians for one class need scikit-learn, got none: pip install scikit-learn"
        ) from error
    different = len(x.unique(dim=0))
    found = KMeans(min(k, different), n_init=1, random_state=0).fit(x.cpu().numpy())
    return torch.from_numpy(found.cluster_centers_).to(x)


def _lost(scatters: list[Scatter], covariances: list[Spectrum]) -> tuple[Tensor | None, bool]:
    """The residual of moments that have lost directions, and whether it is in cosines; None if nothing is lost."""
    found = [scatter.lost(held) for scatter, held in zip(scatters, covariances, strict=True)]
    if not any(one is not None and bool(one.any()) for one in found):
        return None, False
    d = len(scatters[0].mean)
    lost = [torch.zeros(2, d, dtype=torch.float64) if one is None else one.cpu() for one in found]
    entries, of_cosines = torch.stack(lost, 1)
    return nearer_to_diagonal(entries, of_cosines)
