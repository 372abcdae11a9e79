"""The defaults of every method, once more. Tables and documents rest on them: who changes one changes it here too."""

from __future__ import annotations

import pytest
import torch

import maecho
from maecho.aggregation import DENSE, OT, MAEcho
from maecho.echo.fit import Regression
from maecho.echo.simulated import Drawing
from support import tiny
from support.clients import batches, clients

ALIGNMENT = "transport='emd', regularisation=0.05, reference='largest', metric='weights', probes=1000, seed=0"
ITERATION = (
    "form='released', steps=None, step_size=None, normalise=None, mu=1.0, alpha='uniform', cap=1.0, projector=None, "
    "damping=0.001, solver='iterate', start='average'"
)
DEFAULTS = {
    "fedavg": "FedAvg(weighting='examples', head='average')",
    "ma-echo": f"MAEcho({ITERATION}, seed=0, head=None)",
    "ma-echo+ot": f"MAEchoOT({ALIGNMENT}, {ITERATION}, head=None)",
    "ot": f"OT({ALIGNMENT}, weighting='uniform', head='average')",
    "pfnm": f"PFNM({ALIGNMENT}, sigma0=1.0, sigma=1.0, gamma=7.0, growth=2.0, estimate='map')",
    "fedma": f"FedMA({ALIGNMENT}, sigma0=1.0, sigma=1.0, gamma=7.0, growth=1.0, estimate='mean')",
    "regmean": "RegMean(ridge=0.001, shrink=1.0)",
    "fisher": "Fisher(ridge=0.001, weighting='examples')",
    "kronecker": ("Kronecker(damping='released', ridge=0.001, weighting='examples', tolerance=1e-06, iterations=2000)"),
    "afl": "AFL(ridge=0.001, backbone='shared')",
    "dense": (
        "DENSE(epochs=20, generator_steps=15, student_steps=100, batch_size=128, width=16, learning_rate=0.01, "
        "temperature=4.0, batchnorm=1.0, boundary=0.5, ensemble='logits', start='average', input_shape=None, "
        "scale=None, seed=0, device=None)"
    ),
    "echo-chain": (
        "EchoChain(ridge=0.0005, head='ridge', pull=0.5, draws=20000, chunk=1000, seed=0, features=True, "
        "noise='leaves')"
    ),
}


def test_every_method_has_the_defaults_written_here() -> None:
    assert {name: repr(method) for name, method in maecho.METHODS.items()} == DEFAULTS


@pytest.mark.parametrize("name", maecho.METHODS)
def test_the_class_and_the_table_have_the_same_defaults(name: str) -> None:
    method = maecho.METHODS[name]
    assert type(method)() == method


def test_a_relay_has_the_defaults_of_echo_chain() -> None:
    regression, drawing = maecho.METHODS["echo-chain"].parts()  # type: ignore[attr-defined]
    assert (regression, drawing) == (Regression(), Drawing())
    assert repr(Regression()) == "Regression(ridge=0.0005, head='ridge', pull=0.5)"


CONVOLUTION = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(20, 5))
RESOLVED = {
    # form, convolutions: steps, step_size, normalise, head, projector
    ("released", False): (60, 1.6, False, "class-aware", "batch-mean"),
    ("released", True): (300, 0.05, True, "class-aware", "batch-mean"),
    ("printed", False): (60, 0.5, False, "iterate", "exact"),
    ("printed", True): (300, 0.5, False, "iterate", "exact"),
    ("anchored", False): (60, 0.5, False, "iterate", "exact"),
    ("anchored", True): (300, 0.5, False, "iterate", "exact"),
}


@pytest.mark.parametrize(("form", "convolutions"), RESOLVED)
def test_what_none_stands_for_in_ma_echo(form: str, convolutions: bool) -> None:
    upload = clients(1)[0]
    if convolutions:
        upload = maecho.make_upload(CONVOLUTION, [(x.unsqueeze(1), y) for x, y in batches()], "a")
    found = MAEcho(form=form)._for(upload, True)  # type: ignore[arg-type]
    expected = RESOLVED[form, convolutions]
    assert (found.steps, found.step_size, found.normalise, found.head, found._projector) == expected


def test_what_none_stands_for_in_dense() -> None:
    assert (DENSE()._scale, DENSE(input_shape=(4,))._scale) == ("moments", "standard")


def test_ot_averages_uniformly_unless_examples_are_asked_for() -> None:
    """Neurons that differ by a hair are in one order already, so that only the average is left."""
    models = [tiny.network(), tiny.network()]
    with torch.no_grad():
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            other.copy_(one + 1e-3)
    few, many = (maecho.make_upload(model, [torch.ones(n, 4)], f"{n}") for n, model in zip((2, 6), models, strict=True))
    for method, share in ((OT(), 1 / 2), (OT(weighting="examples"), 6 / 8)):
        merged = method([few, many])
        for name, tensor in few.weights.items():
            torch.testing.assert_close(merged[name], tensor + share * 1e-3, rtol=0, atol=1e-6)
