"""The peers of many rounds: FedAvg and what was built on it.

w is the global model of a round, w_i what client i returns, Δ_i = w − w_i, p_i its share of the round's examples,
‖a_i‖₁ how many gradients of full weight its steps come to (`Local.effective_steps`), and S the round's clients, out of
N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from maecho.options import NOT_NEGATIVE, POSITIVE, number, one_of
from maecho.rounds.servers import NoCorrection, Outcome, Round, Server, State, Weights, size
from maecho.rounds.training.local import Correction


@dataclass(frozen=True)
class Average(NoCorrection):
    """FedAvg (McMahan et al., AISTATS 2017): w ← Σ p_i w_i."""

    def __call__(self, round_: Round, state: State) -> Outcome:
        return Outcome(round_.average(), state, size(round_.weights))


@dataclass(frozen=True)
class Proximal(Average):
    """FedProx (Li et al., MLSys 2020): clients minimise f_i(v) + μ/2 ‖v − w‖². With μ = 0 it is FedAvg."""

    mu: float = 0.1

    def __post_init__(self) -> None:
        number("mu", self.mu, NOT_NEGATIVE, 0)

    def correction(self, weights: Weights, state: State, client: int) -> Correction:
        return Correction(pull=self.mu)


@dataclass(frozen=True)
class Scaffold(NoCorrection):
    """SCAFFOLD (Karimireddy et al., ICML 2020), option II. Clients add c − c_i to every gradient. Then

        c_i⁺ = c_i − c + Δ_i / (η ‖a_i‖₁),   c ← c + 1/N Σ_S (c_i⁺ − c_i),   w ← w − step · 1/|S| Σ_S Δ_i.

    The paper divides by η times the number of steps; with momentum a step's gradient counts more than once. While all
    control variates are 0, which is so in the first round, it is FedAvg on clients of equal size.
    """

    step: float = 1.0

    def __post_init__(self) -> None:
        number("step", self.step, POSITIVE, 0)

    def correction(self, weights: Weights, state: State, client: int) -> Correction:
        c = {name.removeprefix("c "): t for name, t in state.items() if name.startswith("c ")}
        if not c:
            return Correction()
        own = {name: state.get(f"{client} {name}", torch.zeros_like(t)) for name, t in c.items()}
        return Correction(offset={name: t - own[name] for name, t in c.items()})

    def __call__(self, round_: Round, state: State) -> Outcome:
        new = dict(state)
        even = 1 / len(round_.returned)
        for one in round_.returned:
            scale = round_.local.learning_rate * round_.local.effective_steps(one.examples)
            for name, delta in round_.moved(one).items():
                c = state.get(f"c {name}", torch.zeros_like(delta))
                own = state.get(f"{one.client} {name}", torch.zeros_like(delta))
                new[f"{one.client} {name}"] = own - c + delta / scale
                change = (new[f"{one.client} {name}"] - own) / round_.clients
                new[f"c {name}"] = new.get(f"c {name}", torch.zeros_like(delta)) + change
        move = round_.mean(round_.moved, lambda one: even)
        moved = {n: round_.weights[n] - self.step * d for n, d in move.items()}
        return Outcome({**round_.average(), **moved}, new, 2 * size(round_.weights))


@dataclass(frozen=True)
class Normalised(NoCorrection):
    """FedNova (Wang et al., NeurIPS 2020): w ← w − τ Σ p_i Δ_i / ‖a_i‖₁ with τ = Σ p_i ‖a_i‖₁. Clients that take more
    steps count no more for it. With equal numbers of steps it is FedAvg."""

    def __call__(self, round_: Round, state: State) -> Outcome:
        a = {one.client: round_.local.effective_steps(one.examples) for one in round_.returned}
        tau = sum(round_.share(one) * a[one.client] for one in round_.returned)
        move = round_.mean(round_.moved, lambda one: round_.share(one) * tau / a[one.client])
        moved = {name: round_.weights[name] - d for name, d in move.items()}
        return Outcome({**round_.average(), **moved}, state, size(round_.weights))


@dataclass(frozen=True)
class Dynamic(NoCorrection):
    """FedDyn (Acar et al., ICLR 2021). Clients minimise f_i(v) − ⟨h_i, v⟩ + α/2 ‖v − w‖². Then

        h_i ← h_i + α Δ_i,   h ← h + α/N Σ_S Δ_i,   w ← 1/|S| Σ_S w_i − h/α.

    Where nothing moves, it stays where FedAvg stays.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        number("alpha", self.alpha, POSITIVE, 0)

    def correction(self, weights: Weights, state: State, client: int) -> Correction:
        own = {n.removeprefix(f"{client} "): -t for n, t in state.items() if n.startswith(f"{client} ")}
        return Correction(self.alpha, own or None)

    def __call__(self, round_: Round, state: State) -> Outcome:
        new = dict(state)
        for one in round_.returned:
            for name, delta in round_.moved(one).items():
                zero = torch.zeros_like(delta)
                new[f"{one.client} {name}"] = new.get(f"{one.client} {name}", zero) + self.alpha * delta
                new[f"h {name}"] = new.get(f"h {name}", zero) + self.alpha / round_.clients * delta
        even = 1 / len(round_.returned)
        mean = round_.mean(lambda one: one.weights, lambda one: even)
        out = {n: t - new[f"h {n}"] / self.alpha if n in round_.trained else t for n, t in mean.items()}
        return Outcome(out, new, size(round_.weights))


@dataclass(frozen=True)
class Momentum(NoCorrection):
    """FedAvgM (Hsu et al., 2019): v ← β v + Σ p_i Δ_i, w ← w − step · v. With β = 0 and step 1 it is FedAvg."""

    beta: float = 0.9
    step: float = 1.0

    def __post_init__(self) -> None:
        number("beta", self.beta, "at least 0 and below 1", 0, 1 - 1e-9)
        number("step", self.step, POSITIVE, 0)

    def __call__(self, round_: Round, state: State) -> Outcome:
        delta = round_.mean(round_.moved)
        v = {n: self.beta * state[f"v {n}"] + d if f"v {n}" in state else d for n, d in delta.items()}
        moved = {n: round_.weights[n] - self.step * t for n, t in v.items()}
        return Outcome({**round_.average(), **moved}, {f"v {n}": t for n, t in v.items()}, size(round_.weights))


@dataclass(frozen=True)
class Adaptive(NoCorrection):
    """FedAdam and FedYogi (Reddi et al., ICLR 2021). With Δ = Σ p_i Δ_i:

        m ← β₁ m + (1 − β₁) Δ,   v ← β₂ v + (1 − β₂) Δ²  (Yogi: v − (1 − β₂) Δ² sign(v − Δ²)),   w ← w − step · m / (√v
        + τ).

    With β₁ = 0 and a τ that is far above √v, and step = τ, it is FedAvg.
    """

    kind: Literal["adam", "yogi"] = "adam"
    step: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("adam", "yogi"))
        number("step", self.step, POSITIVE, 0)
        number("tau", self.tau, POSITIVE, 0)
        for name in ("beta_1", "beta_2"):
            number(name, getattr(self, name), "at least 0 and below 1", 0, 1 - 1e-9)

    def __call__(self, round_: Round, state: State) -> Outcome:
        new: dict[str, Tensor] = {}
        out = round_.average()
        for name, delta in round_.mean(round_.moved).items():
            m = state.get(f"m {name}", torch.zeros_like(delta))
            v = state.get(f"v {name}", torch.full_like(delta, self.tau**2))
            m = self.beta_1 * m + (1 - self.beta_1) * delta
            square = delta.square()
            grown = self.beta_2 * v + (1 - self.beta_2) * square
            v = grown if self.kind == "adam" else v - (1 - self.beta_2) * square * torch.sign(v - square)
            new[f"m {name}"], new[f"v {name}"] = m, v
            out[name] = round_.weights[name] - self.step * m / (v.sqrt() + self.tau)
        return Outcome(out, new, size(round_.weights))


PEERS: dict[str, Server] = {
    "fedavg": Average(),
    "fedprox": Proximal(),
    "scaffold": Scaffold(),
    "fednova": Normalised(),
    "feddyn": Dynamic(),
    "fedavgm": Momentum(),
    "fedadam": Adaptive(),
    "fedyogi": Adaptive("yogi"),
}
"""Name -> the peer with its published settings."""
