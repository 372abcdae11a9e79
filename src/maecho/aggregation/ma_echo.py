"""MA-Echo: one model close to all clients' models wherever they have data.

    min_{W, V_i}  [‖(W − V_1) P_1‖², …, ‖(W − V_N) P_N‖²]    s.t. V_i as good as W_i for client i        Eq. (4)

(Su, Li, Xue, Neural Networks 2023.) The printed algorithm, the authors' code and their equations differ. The option
`form` chooses one of the three. The default is the authors' code, which reaches the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from maecho import devices
from maecho.aggregation.average import ClassAwareHead, Mean
from maecho.aggregation.method import Guide, assemble
from maecho.aggregation.units import common_units
from maecho.errors import InputError
from maecho.linalg.grams import in_terms_of, in_terms_of_one, in_unit, mean_of_data
from maecho.linalg.spectra import Spectrum, projector
from maecho.linalg.steps.iteration import Coefficients, Iterates, iterates
from maecho.linalg.steps.limits import Limit, largest_step
from maecho.linalg.symmetric import Diagonal
from maecho.network.layers import Layer
from maecho.options import POSITIVE, number, one_of
from maecho.progress import track
from maecho.upload.cohort import Cohort
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@dataclass(frozen=True)
class Iteration:
    """The state of the algorithm between two steps, for `watch`."""

    step: int
    """How many steps are done."""
    merged: Callable[[], Merged]
    """Makes the global model as it is now."""
    client: Callable[[int], Merged]
    """Makes the model V_i of client i as it is now."""


@dataclass(frozen=True)
class MAEcho:
    """The paper's method, in three forms.

    Args:
        form: "released" is the authors' code, "printed" is Algorithm 1, and "anchored" is Eq. (11), which computes V_i
            from W_i in every step.
        steps: τ. By default 60, or 300 for a network with convolutions, as in the release.
        step_size: λ of the released form, η of the others. By default the released form takes 1.6, or 0.05 with
            convolutions, as the release does. The others take 0.5, since the paper gives no value.
        normalise: Norm. It gives every row of a step of V_i the length 1, or λ in the released form, whatever the unit
            of the weights. By default only the released form does so, and only with convolutions, as the release does.
        mu: μ of the printed and anchored forms. With a larger μ, V_i stays closer to what W_i does on the client's
            data.
        alpha: the weights of the clients. "uniform" gives 1/N to each. "qp" solves Eq. (6), which prefers clients with
            small gradients.
        cap: C, the largest weight that the quadratic program may give.
        projector: "batch-mean" is the release's recursion, "exact" is G (G + zI)⁻¹. By default the released form takes
            the recursion, the others the exact projector. The recursion depends on the units of the data, since its
            damping is a fixed number (docs/ma-echo.md). The exact projector does not.
        damping: z of the exact projector, as a share of the mean eigenvalue of G along the data. The constant input of
            a bias is measured in the data's unit (linalg/units.py), so the result does not depend on units.
        solver: "iterate" takes the steps. "limit" computes where they end, and needs uniform alpha and no Norm.
        start: W⁰: "average", "random", or the name of a client.
        seed: the seed of the random start.
        head: what happens to the last layer. "class-aware" averages each class's row over the clients that have the
            class, and does not iterate. "iterate" treats it as any layer. By default it is class-aware in the released
            form if uploads count classes.
        watch: a function. It is called with an `Iteration` before the first step and after every step.
    """

    guide: ClassVar[Guide] = Guide(
        does="moves all models towards each other, each only in directions in which its own data have no inputs",
        uploads="projectors (or Grams); class counts if there are any",
        different="MLPs yes, CNNs less",
        convolutions="yes",
        residual="yes",
        cost="seconds; memory of all uploads, of one with `solver=limit`",
        when="to use the paper's method",
    )

    form: Literal["released", "printed", "anchored"] = "released"
    steps: int | None = None
    step_size: float | None = None
    normalise: bool | None = None
    mu: float = 1.0
    alpha: Literal["uniform", "qp"] = "uniform"
    cap: float = 1.0
    projector: Literal["batch-mean", "exact"] | None = None
    damping: float = 1e-3
    solver: Literal["iterate", "limit"] = "iterate"
    start: str = "average"
    seed: int = 0
    head: Literal["class-aware", "iterate"] | None = None
    watch: Callable[[Iteration], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        one_of("form", self.form, ("released", "printed", "anchored"))
        one_of("alpha", self.alpha, ("uniform", "qp"))
        one_of("projector", self.projector, (None, "batch-mean", "exact"))
        one_of("solver", self.solver, ("iterate", "limit"))
        one_of("head", self.head, (None, "class-aware", "iterate"))
        one_of("normalise", self.normalise, (None, True, False))
        if self.steps is not None:
            number("steps", self.steps, "a whole number, at least 0", 0, whole=True)
        if self.step_size is not None:
            number("step_size", self.step_size, POSITIVE, 0)
        number("mu", self.mu, POSITIVE, 0)
        number("damping", self.damping, POSITIVE, 0)
        number("cap", self.cap, POSITIVE, 0)
        number("seed", self.seed, "a whole number, at least 0", 0, whole=True)
        if not (self.watch is None or callable(self.watch)):
            raise InputError(f"watch must be a function, got {self.watch!r}")
        if self.normalise and self.form == "anchored":
            raise InputError("normalise must be off in the anchored form, which has no step of V_i to normalise")
        if self.solver == "limit" and (self.alpha == "qp" or self.normalise or self.watch):
            raise InputError(
                "solver must be iterate with alpha='qp', normalise or watch: the limit is of the linear steps"
            )
        if self.solver == "limit" and self.step_size is not None:
            bound = largest_step(self.form, self.mu)
            if self.step_size >= bound:
                raise InputError(
                    f"step_size must be below {bound:g} for a limit in the {self.form} form, got {self.step_size:g}: "
                    "the steps would diverge where clients share an input"
                )

    @property
    def needs(self) -> frozenset[str]:
        statistic = "projector" if self._projector == "batch-mean" else "gram"
        return frozenset({statistic, "classes"} if self.head == "class-aware" else {statistic})

    @property
    def uses(self) -> frozenset[str]:
        """The released form reads class counts for its head if uploads have them."""
        return frozenset({"classes"} if self.head is None and self.form == "released" else ())

    @property
    def _projector(self) -> str:
        return self.projector or ("batch-mean" if self.form == "released" else "exact")

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        uploads = uploads if isinstance(uploads, Cohort) else Cohort(uploads, self.needs, "ma-echo", uses=self.uses)
        first = uploads[0]
        method = self._for(first, "classes" in uploads.has)
        if method.alpha == "qp" and method.cap < 1 / len(uploads):
            raise InputError(f"cap must be at least 1/{len(uploads)} for {len(uploads)} clients, got {method.cap}")
        exact = method._projector == "exact"
        gathered = _Collected(method, first, common_units(uploads, "uniform") if exact else {})
        order = list(range(len(uploads)))
        if method.normalise:
            # Steps of one length turn about the solution at last, and rounding decides their direction. In the order of
            # names it is the same in every order of the uploads.
            order.sort(key=uploads.clients.__getitem__)
        for index in order:
            gathered.add(uploads[index])
        start = gathered.start()
        if method.solver == "limit":
            found = {name: limit.matrix(start[name]) for name, limit in gathered.limits.items()}
            return gathered.result(found)
        return method._iterate(gathered, start, order)

    def _iterate(self, gathered: _Collected, start: Mapping[str, Tensor], order: list[int]) -> Merged:
        layers: dict[str, Iterates] = {
            name: iterates(start[name].to(local[0].dtype), local, gathered.spectra[name], self._coefficients())
            for name, local in gathered.local.items()
        }

        def global_model() -> Merged:
            return gathered.result({n: x.mean() if self.form == "released" else x.merged() for n, x in layers.items()})

        def client_model(index: int) -> Merged:
            at = order.index(range(len(order))[index])
            return gathered.result({name: x.client(at) for name, x in layers.items()})

        assert self.steps is not None
        if self.watch is not None:
            self.watch(Iteration(0, global_model, client_model))
        for step in track(range(1, self.steps + 1), "ma-echo"):
            for layer in layers.values():
                layer.step()
            if self.watch is not None:
                self.watch(Iteration(step, global_model, client_model))
        return global_model()

    def _for(self, upload: Upload, counted: bool) -> MAEcho:
        """The same method, in which every option that was None has its value. `counted` says whether all clients count
        their classes."""
        convolutions = any(layer.convolution for layer in upload.layers)
        released = self.form == "released"
        counted = counted and upload.head is not None
        normalise = released and convolutions and self.solver == "iterate"
        size = (0.05 if convolutions else 1.6) if released else 0.5
        return replace(
            self,
            steps=(300 if convolutions else 60) if self.steps is None else self.steps,
            step_size=size if self.step_size is None else self.step_size,
            normalise=normalise if self.normalise is None else self.normalise,
            head=("class-aware" if released and counted else "iterate") if self.head is None else self.head,
        )

    def _coefficients(self) -> Coefficients:
        assert self.step_size is not None
        assert self.normalise is not None
        alpha = self._solve_qp if self.alpha == "qp" else None
        if self.form == "released":
            return Coefficients(self.step_size, self.step_size, self.step_size, normalised=self.normalise, alpha=alpha)
        hold = self.mu / (1 + self.mu)
        return Coefficients(2 * self.step_size, 1.0, hold, self.form == "anchored", self.normalise, alpha)

    def _solve_qp(self, gram: Tensor) -> Tensor:
        from maecho.linalg.simplex import capped_simplex

        return torch.from_numpy(capped_simplex(gram.double().cpu().numpy(), self.cap))

    def spectrum(self, upload: Upload, layer: str, unit: Tensor | None = None) -> Spectrum | Diagonal:
        """The projector P of one client and layer, for inputs (x, c) with c = `unit`, by default the client's own."""
        G: Spectrum | Diagonal
        if self._projector == "batch-mean":
            P: Spectrum | Diagonal = upload.statistics["projector"][layer]
            return P
        G = upload.statistics["gram"][layer]
        z = self.damping * float(mean_of_data(G).mean())
        G = in_unit(G, unit)
        return projector(G, z) if z else G


class _Collected:
    """Keeps what the method needs of the uploads. For layers these are all matrices if it iterates, and sums if it
    takes the limit. For all other weights they are averages."""

    def __init__(self, method: MAEcho, first: Upload, units: Mapping[str, Tensor | None]):
        self._method, self._first, self._units = method, first, units
        self._mean, self._uniform = Mean("examples"), Mean("uniform")
        self._head = ClassAwareHead("uniform") if method.head == "class-aware" else None
        self._layers: list[Layer] = [x for x in first.layers if not (self._head and x.name == first.head)]
        self._silent = {layer.name for layer in self._layers}
        self._start: dict[str, Tensor] | None = None
        self.local: dict[str, list[Tensor]] = {layer.name: [] for layer in self._layers}
        self.spectra: dict[str, list[Spectrum | Diagonal]] = {layer.name: [] for layer in self._layers}
        self.limits = {layer.name: Limit(method._coefficients()) for layer in self._layers}

    def add(self, upload: Upload) -> None:
        self._mean.add(upload)
        self._uniform.add(upload)
        if self._head:
            self._head.add(upload)
        if upload.client == self._method.start:
            self._start = dict(upload.weights)
        for layer in self._layers:
            P = self._method.spectrum(upload, layer.name, self._units.get(layer.name))
            W = self._matrix(layer, upload.weights)
            if P.known:
                self._silent.discard(layer.name)
            if self._method.solver == "limit":
                self.limits[layer.name].add(W, P)
            else:
                # Half precision would lose small steps. So only the result is rounded to it.
                self.local[layer.name].append(W.to(devices.float32_or_finer([W])))
                self.spectra[layer.name].append(P)

    def start(self) -> dict[str, Tensor]:
        """The start W⁰ of every layer, in float64."""
        average, which = self._uniform.weights(), self._method.start
        if which == "random":
            generator = torch.Generator().manual_seed(self._method.seed)
            found = {}
            for layer in self._layers:
                W = self._matrix(layer, average)
                noise = torch.randn(W.shape, generator=generator, dtype=torch.float64).to(W)
                found[layer.name] = noise * W.square().mean().sqrt()
            return found
        if which != "average" and self._start is None:
            raise InputError(f"start must be average, random or the name of a client, got {which!r}")
        weights = average if which == "average" or self._start is None else self._start
        return {layer.name: self._matrix(layer, weights).double() for layer in self._layers}

    def _matrix(self, layer: Layer, weights: Mapping[str, Tensor]) -> Tensor:
        """[W b/c]: the matrix for inputs (x, c)."""
        return in_terms_of(layer.matrix(weights), self._units.get(layer.name))

    def result(self, found: Mapping[str, Tensor]) -> Merged:
        plain = self._mean.weights()
        matrices = {name: in_terms_of_one(matrix, self._units.get(name)) for name, matrix in found.items()}
        if self._head and self._first.head:
            layer = next(layer for layer in self._first.layers if layer.name == self._first.head)
            matrices[layer.name] = self._head.matrix(layer.matrix(self._uniform.weights()))
            return assemble(self._first, plain, matrices, {*self._silent, layer.name})
        return assemble(self._first, plain, matrices, self._silent)
