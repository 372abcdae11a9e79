"""Every method in many settings, a network with every kind of part, and comparing two models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.aggregation import AFL, DENSE, OT, PFNM, EchoChain, FedAvg, Fisher, Kronecker, MAEcho, MAEchoOT, RegMean
from maecho.statistics import STATISTICS
from maecho.upload.client import make_upload
from support.clients import network
from support.tiny import QUICK

EVERY = {
    **maecho.METHODS,
    "fedavg uniform": FedAvg(weighting="uniform"),
    "fedavg class-aware": FedAvg(head="class-aware"),
    "ma-echo printed": MAEcho(form="printed"),
    "ma-echo anchored": MAEcho(form="anchored", head="class-aware"),
    "ma-echo qp": MAEcho(form="printed", alpha="qp"),
    # Steps of one length end by bouncing around W, where weights from the QP turn round-off into chaos: stop before.
    "ma-echo released qp": MAEcho(alpha="qp", steps=60),
    "ma-echo norm": MAEcho(normalise=True, step_size=0.05, head="iterate"),
    "ma-echo limit": MAEcho(solver="limit"),
    "ma-echo printed limit": MAEcho(form="printed", solver="limit"),
    "ma-echo anchored limit": MAEcho(form="anchored", solver="limit"),
    "regmean shrunk": RegMean(shrink=0.9, ridge=0),
    "fisher uniform": Fisher(weighting="uniform", ridge=0),
    "kronecker uniform": Kronecker(weighting="uniform", damping=1e-3, ridge=1e-3, tolerance=1e-9),
    "pfnm mean": PFNM(estimate="mean"),
    "afl": AFL(backbone="average"),  # these clients share no backbone; those that do are in test_afl.py
    "dense": DENSE(**QUICK["dense"], model=network()),
    "ot activations": OT(metric="activations", probes=200, model=network()),
    "ma-echo+ot activations": MAEchoOT(metric="activations", probes=200, model=network()),
    "echo-chain": EchoChain(draws=500, model=network()),
    "echo-chain to the clients alone": EchoChain(head="regression", pull=0, draws=500, model=network()),
}
"""All rows of METHODS, and settings of them that run other code."""


class Everything(nn.Module):
    """A network with grouped convolutions, normalisation, a counter, an embedding, a free parameter, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.conv(self.embed(tokens).transpose(1, 2))).relu().mean(2) * self.scale
        return self.head(self.two(self.one(h).relu()).relu())


def everything(count: int, dtype: torch.dtype = torch.float32) -> list[maecho.Upload]:
    made = []
    for i in range(count):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            model = Everything().to(dtype)
            data = [(torch.randint(0, 7, (8, 6)), torch.randint(0, 5, (8,))) for _ in range(3 + i)]
            with torch.no_grad():
                for x, _ in data:
                    model(x)
        with pytest.warns(UserWarning, match="not sent: moments, features, since the inputs are not one tensor"):
            made.append(make_upload(model, data, f"client-{i}", STATISTICS))
    return made


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(
            one[key], other[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def skip_pfnm(name: str, why: str = "pfnm is for fully connected networks alone") -> None:
    if name == "pfnm" or (name == "pfnm mean" and "fully" in why):
        pytest.skip(why)


def skip_tokens(name: str) -> None:
    skip_pfnm(name)
    if name == "dense":
        pytest.skip("dense generates real numbers, not the tokens that an embedding takes")
    if "echo-chain" in name or "activations" in name:
        pytest.skip("inputs are drawn by mean and covariance, and an embedding takes tokens")
