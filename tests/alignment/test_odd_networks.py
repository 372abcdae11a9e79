"""Networks whose neurons lie on unusual axes: an alignment does not change what a trained client computes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.alignment.transport import Alignment
from maecho.network.spaces import permute, verify
from maecho.network.tracing import derive
from support.clients import rng
from support.odd_networks import ODD

METHODS = ["ot", "ma-echo+ot", "fedma"]


def trained(name: str, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network that knows the classes of its few inputs by heart."""
    make, x = ODD[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
    y = torch.randint(0, 3, (len(x),), generator=rng(7))
    optimiser = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval(), x, y


def accuracy(model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    model.load_state_dict(weights)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("name", ODD)
def test_every_space_that_is_found_holds(name: str) -> None:
    make, x = ODD[name]
    model = make().double().eval()
    x = x.double() if x.is_floating_point() else x
    verify(model, derive(model, x), x, tolerance=1e-9)


@pytest.mark.filterwarnings("ignore:.*not sent. .*since the inputs are not one tensor")
@pytest.mark.parametrize("name", ODD)
def test_an_aligned_client_computes_what_it_did(name: str) -> None:
    (model, x, y), (other, _, _) = trained(name, 0), trained(name, 1)
    uploads = [maecho.make_upload(m, [(x, y)], c, rank=None) for m, c in ((model, "ann"), (other, "bob"))]
    aligned = Alignment(reference="bob").align(uploads)[0]
    with torch.no_grad():
        before = model(x)
        model.load_state_dict(aligned.state_dict())
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*not sent. .*since the inputs are not one tensor")
@pytest.mark.parametrize(
    ("name", "method"),
    [*itertools.product(ODD, METHODS), ("linear on tokens, flatten", "pfnm"), ("batch norm of tokens", "pfnm")],
)
def test_a_client_alone_keeps_its_accuracy(name: str, method: str) -> None:
    """Also beside a copy of itself whose neurons are in another order."""
    model, x, y = trained(name, 0)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    own = accuracy(model, before, x, y)
    options = {"growth": 1.0} if method == "pfnm" else {}  # of the width that the network has
    assert own > 0.9
    ann = maecho.make_upload(model, [(x, y)], "ann", rank=None)
    assert accuracy(model, dict(maecho.aggregate([ann], method, **options)), x, y) == own
    assert ann.spaces is not None
    orders = {space.name: torch.randperm(space.size, generator=rng(3)) for space in ann.spaces}
    model.load_state_dict(permute(before, ann.spaces, orders))
    bob = maecho.make_upload(model, [(x, y)], "bob", rank=None)
    assert accuracy(model, dict(maecho.aggregate([ann, bob], method, **options)), x, y) == own
